"""What is measured on a GPU; `scripts/gpu_suite.sh` runs it."""
