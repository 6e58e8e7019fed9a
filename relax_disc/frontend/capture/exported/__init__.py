"""torch.export of the user's model and loss, for all declared sizes, with this package's errors."""
