"""Sizes while a model is exported: names, ranges, what compares them, what only data tell."""
