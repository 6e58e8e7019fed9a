"""Forty-odd models, each compiled once, trained at several shapes and compared with PyTorch."""
