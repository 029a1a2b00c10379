#!/usr/bin/env bash
# Starts a run on this machine.
#
#   launch/local.sh CONFIG [section.key=value ...]          reinforcement learning
#   TASK=sft launch/local.sh CONFIG [section.key=value ...] supervised fine-tuning
#
# NPROC is the number of trainer ranks. The rollout engines take the GPUs after the first NPROC, so on 8 GPUs NPROC=4
# leaves 4 for rollout.num_engines x rollout.tensor_parallel_size. Without a GPU the ranks talk over gloo.
set -euo pipefail

if [ $# -eq 0 ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

if [ -z "${NPROC:-}" ]; then
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
    NPROC=$((gpus > 1 ? gpus / 2 : 1)) # half for training, half for sampling
fi

# The environment that `make setup` made, or the one that is active (an image, a module).
bin=$(dirname "$0")/../.venv/bin
command=otb-megatron
[ -x "$bin/otb-megatron" ] && command=$bin/otb-megatron

# More threads than cores make ranks wait for each other; on GPUs the host has little to compute.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$command" launch --nproc-per-node "$NPROC" "${TASK:-train}" "$@"
