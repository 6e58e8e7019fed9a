"""Clean-up of the operator graph before kernels are made."""
