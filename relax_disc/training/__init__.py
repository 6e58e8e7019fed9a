"""What stands behind `TrainingStep`: checking a batch, binding PyTorch's tensors, reports."""
