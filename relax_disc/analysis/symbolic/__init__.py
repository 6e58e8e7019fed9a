"""Sizes that are not known: expressions, their comparison, the shape graph."""
