"""Measurements against other systems; each module runs as `python -m benchmarks.<name>`."""
