#!/usr/bin/env bash
# Run the training step on this machine's GPU: losses and gradients against float64 PyTorch, step
# time and peak memory next to torch.compile's. Writes benchmarks/results/gpu_check.json.
#
# Needs a CUDA build of torch 2.13 in the environment, and TVM as pyproject.toml pins it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu_check: torch sees no GPU here; nothing was checked" >&2
  exit 2
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
exec "$python" -m benchmarks.gpu_check "$@"
