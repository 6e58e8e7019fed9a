"""The optimizer's part of a step: states, sums of gradients, clipping, updates."""
