#!/usr/bin/env bash
# Measure on this machine's GPU, the most valuable first: whether anything works, numbers, the
# paper's model beside PyTorch's ways, kernels' share of bandwidth, budgets, compute-sanitizer.
# Writes benchmarks/results/gpu_<gpu>_<part>.json row by row; run it again to go on.
#
#   scripts/gpu_suite.sh [--parts smoke,numbers] [--seconds 570] [--copy-to FOLDER] [--retry]
#
# --seconds: the run has ended by then, however long preparing took. --copy-to: for a machine that
# may be taken away. --retry: measure again what failed; without it that is left out.
# Rows of another commit are measured again; a copy without git is told its commit by
# RELAX_DISC_COMMIT.
#
# Needs no network: TVM is taken from the folder of wheels that WHEELS names (apache-tvm and
# apache-tvm-ffi as pyproject.toml pins them, or what scripts/pack_wheels.py makes of them).
# PyTorch is the machine's own; another than 2.13 passes with a warning.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ -n "${WHEELS:-}" ]; then
  site=${SITE:-${TMPDIR:-/tmp}/relax_disc_site}
  if [ ! -d "$site/tvm" ]; then
    "$python" scripts/pack_wheels.py --unpack "$WHEELS"
    rm -rf "$site" "$site.part"
    "$python" -m pip install -q --no-index --no-deps --no-compile \
      --target "$site.part" "$WHEELS"/*.whl
    mv "$site.part" "$site"
  fi
  export PYTHONPATH=$site:${PYTHONPATH:-}
fi
# PyTorch's convolutions would round to TF32, whose errors hide ours.
export NVIDIA_TF32_OVERRIDE=0
export RELAX_DISC_UNTESTED_TORCH=1 PYTHONPATH=$PWD:${PYTHONPATH:-}
if command -v nvidia-smi > /dev/null; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
fi
exec "$python" -m benchmarks.gpu.suite --spent "$SECONDS" "$@"
