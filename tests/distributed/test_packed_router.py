"""One router by itself: which calls it refuses, and the experts' bias that Megatron updates outside the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from otb_megatron.config import ParallelConfig
from otb_megatron.mcore.parallel import start_parallel, stop_parallel
from otb_megatron.mcore.router import PackedRouter, PackRouting
from tests.distributed.launcher import run_ranks

ROWS, EXPERTS, HIDDEN = 7, 4, 8
PADDING = torch.tensor([False, False, True, False, False, True, False])


def _router(**fields: Any) -> PackedRouter:
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel = start_parallel(ParallelConfig(), seed=0, deadline_s=60)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS, moe_router_topk=2, moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True, moe_router_dtype="fp32", moe_token_dispatcher_type="alltoall", **fields,
    )  # fmt: skip
    router = PackedRouter(config=config, pg_collection=parallel.groups)
    router.set_layer_number(1)
    return router


def _pack(experts: torch.Tensor | None = None) -> PackRouting:
    return PackRouting(is_padding=PADDING, sequence=torch.zeros(ROWS, dtype=torch.int64), num_sequences=1, experts=experts)


def _bias(rank: int, world_size: int) -> dict[str, Any]:
    from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias

    torch.manual_seed(0)
    router = _router(moe_router_bias_update_rate=0.25)
    exact = torch.tensor([0.1, 1.00390625, 0.0, -0.3])  # the second is 257 / 256, which bfloat16 cannot hold
    router.expert_bias.copy_(exact)
    buffer = router.expert_bias
    router.bfloat16()
    found: dict[str, Any] = {
        "kept": torch.equal(router.expert_bias, exact) and router.expert_bias is buffer and router.local_tokens_per_expert.dtype == torch.float32
    }
    router.float()

    hidden = torch.randn(ROWS, 1, HIDDEN)
    router.entered, router.trains = _pack(), True
    with torch.no_grad():  # the forward pass of a recomputed layer
        router(hidden)
    found["counted in the forward pass"] = router.local_tokens_per_expert.tolist()
    router.entered = None
    _, choice = router(hidden)  # its recomputation
    found["counted"] = router.local_tokens_per_expert.tolist()
    scores = (hidden[:, 0] @ router.weight.T).sigmoid() + exact
    own = torch.zeros(ROWS, EXPERTS).scatter_(1, scores.topk(2).indices, 1)
    found["choice"], found["own"] = choice.float().tolist(), own.tolist()
    found["expected"] = own[~PADDING].sum(0).tolist()
    _update_router_expert_bias([router], router.config, tp_dp_cp_group=router.tp_dp_cp_group)
    found["bias"] = (router.expert_bias - exact).tolist()
    stop_parallel()
    return found


def test_the_bias_moves_by_the_load_of_real_tokens() -> None:
    """arXiv 2408.15664: up by the rate where an expert got less than the mean, down where it got more. A recomputed layer counts once."""
    found = run_ranks(_bias, 1, timeout_s=60)[0]
    assert found["kept"]
    assert found["choice"] == found["own"]
    assert found["counted in the forward pass"] == [0.0] * EXPERTS
    assert found["counted"] == found["expected"] and sum(found["expected"]) == 2 * 5
    mean = 2 * 5 / EXPERTS
    assert found["bias"] == pytest.approx([0.25 if count < mean else -0.25 for count in found["expected"]], abs=1e-6)


def _refusals(rank: int, world_size: int) -> list[str]:
    router = _router()
    messages = []
    for rows, entered in ((ROWS, None), (ROWS - 1, _pack())):
        router.entered = entered
        with pytest.raises(RuntimeError) as caught:
            router(torch.randn(rows, 1, HIDDEN))
        messages.append(str(caught.value))
    stop_parallel()
    return messages


def test_a_router_without_its_pack_is_an_error() -> None:
    without, other = run_ranks(_refusals, 1, timeout_s=60)[0]
    assert "called without its pack" in without
    assert other == "layer 1 routes 6 tokens of a pack that has 7 here"
