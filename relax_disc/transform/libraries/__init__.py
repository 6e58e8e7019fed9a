"""Operators that library functions compute."""
