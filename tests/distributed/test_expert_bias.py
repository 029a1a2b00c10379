"""The bias that corrects the choice of experts is a float32 buffer in Megatron and part of the model all the same."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from otb_megatron.config import validate as validate_config
from otb_megatron.mcore.model import build_model
from otb_megatron.mcore.parallel import start_parallel, stop_parallel
from otb_megatron.mcore.shards import FullWeights, load_weights
from otb_megatron.mcore.step import ReferenceWeights
from otb_megatron.weights.architectures import load_model
from otb_megatron.weights.files import Checkpoint
from tests.distributed.launcher import run_ranks
from tests.models import make_model

NAME = "model.layers.2.mlp.gate.e_score_correction_bias"


def _bias_out_of_bfloat16(rank: int, world_size: int, model_dir: Path) -> tuple[Tensor, torch.dtype, Tensor, Tensor]:
    values = {"model": {"path": str(model_dir), "dtype": "bfloat16"}, "data": {"train": {"path": "unused"}}}
    config = validate_config(values, "test")
    hf = load_model(model_dir)
    model = build_model(config, hf, start_parallel(config.parallel, seed=0, deadline_s=60))
    load_weights(model, Checkpoint(model_dir))
    model.wrapped_chunks()  # converts parameters and buffers
    weights = FullWeights(model)
    exported = dict(weights.tensors())[NAME].clone()
    dtype = {name: dtype for name, dtype, _ in weights.metadata()}[NAME]
    reference = ReferenceWeights(model)
    router = model.chunks[0].decoder.layers[2].mlp.router
    router.expert_bias += 1.0
    with reference.in_place():
        within = router.expert_bias.clone()
    after = router.expert_bias.clone()
    stop_parallel()
    return exported, dtype, within, after


def test_it_keeps_its_bits_in_bfloat16_and_follows_the_reference(tmp_path: Path) -> None:
    make_model(tmp_path, "deepseek_v3_moe")
    original = Checkpoint(tmp_path).get(NAME)
    exported, dtype, within, after = run_ranks(_bias_out_of_bfloat16, 1, tmp_path, timeout_s=120, process_group=False)[0]
    assert dtype == torch.float32 and not torch.equal(original, original.to(torch.bfloat16).float())
    assert torch.equal(exported, original) and torch.equal(within, original) and torch.equal(after, original + 1.0)
