"""Training loops of other libraries that run compiled steps; each is imported by its own name."""
