"""From a PyTorch model to one traced graph of ATen operators with symbolic sizes."""
