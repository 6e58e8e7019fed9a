#!/usr/bin/env bash
# Measure on this machine's GPU, the most valuable first: whether anything works, numbers, the
# paper's model beside PyTorch's ways, kernels' share of bandwidth, budgets, compute-sanitizer.
# Writes benchmarks/results/gpu_<gpu>_<part>.json row by row; run it again to go on.
#
#   scripts/gpu_suite.sh [--parts smoke,numbers] [--seconds 500]
#
# Needs no network: TVM is taken from the folder of wheels that WHEELS names (apache-tvm and
# apache-tvm-ffi as pyproject.toml pins them, or what scripts/pack_wheels.py makes of them).
# PyTorch is the machine's own; another than 2.13 passes with a warning.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ -n "${WHEELS:-}" ]; then
  site=${SITE:-/tmp/relax_disc_site}
  if [ ! -d "$site/tvm" ]; then
    "$python" scripts/pack_wheels.py --unpack "$WHEELS"
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
  fi
  export PYTHONPATH=$site:${PYTHONPATH:-}
fi
export RELAX_DISC_UNTESTED_TORCH=1 PYTHONPATH=$PWD:${PYTHONPATH:-}
if command -v nvidia-smi > /dev/null; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
fi
exec "$python" -m benchmarks.gpu.suite "$@"
