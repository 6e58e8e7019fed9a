"""Orders of a program's kernels with a low peak of live memory."""
