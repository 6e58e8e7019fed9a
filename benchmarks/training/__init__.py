"""A whole training step next to eager PyTorch and torch.compile."""
