"""PyTorch's own lists of operators and modules, each trained for a step and compared with eager."""
