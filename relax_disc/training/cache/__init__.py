"""What a second start reads instead of compiling again: artefacts, programs, traces."""
