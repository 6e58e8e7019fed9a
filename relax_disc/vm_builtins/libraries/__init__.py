"""Library functions that compiled code calls by name."""
