"""What the model's calls of PyTorch are replaced by while it is exported."""
