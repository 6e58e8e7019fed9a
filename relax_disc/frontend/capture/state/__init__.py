"""What a step reads and writes besides its arguments: tensors, Python values, live numbers."""
