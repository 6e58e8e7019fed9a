"""One call of a compiled function: its batch, its tensors, what can go wrong."""
