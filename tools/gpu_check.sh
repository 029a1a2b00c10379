#!/usr/bin/env bash
# What needs a CUDA device: the tests in tests/gpu, then the statistics head's benchmark.
#
#   tools/gpu_check.sh [DIRECTORY]      writes statistics.json there (default: runs/gpu-check)
#
# $PYTHON, the environment of `make setup` or the python3 on PATH runs it; PyTorch with CUDA, Triton, numba and pytest are enough.
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-runs/gpu-check}

python=${PYTHON:-python3}
[ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ] && python=.venv/bin/python

# A run that skips every test would look like one that passes.
"$python" -c 'import torch; torch.cuda.is_available() or exit("no CUDA device: tests/gpu and its benchmark cannot run here")'
mkdir -p "$output"
"$python" -m pytest tests/gpu -m gpu -p no:cacheprovider
"$python" tools/benchmarks/statistics.py --json "$output/statistics.json"
