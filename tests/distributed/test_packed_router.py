"""One router by itself: which calls it refuses, groups of experts, and the experts' bias that Megatron updates outside the optimizer."""

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
    defaults = dict(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS, moe_router_topk=2, moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True, moe_router_dtype="fp32", moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
    )  # fmt: skip
    config = TransformerConfig(**defaults | fields)
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


SCALING, Z_COEFFICIENT, BALANCE_COEFFICIENT = 1.5, 0.3, 0.7


def _best_groups(rank: int, world_size: int) -> dict[str, Any]:
    """DeepSeek-V2's router on a pack in which two tokens are recorded, each with an expert in either group; one group of the two is taken."""
    torch.manual_seed(0)
    router = _router(
        moe_router_score_function="softmax", moe_router_pre_softmax=True, moe_router_enable_expert_bias=False, moe_router_num_groups=2,
        moe_router_group_topk=1, moe_router_topk_scaling_factor=SCALING, moe_z_loss_coeff=Z_COEFFICIENT, moe_aux_loss_coeff=BALANCE_COEFFICIENT,
        moe_router_load_balancing_type="seq_aux_loss",
    )  # fmt: skip
    experts = torch.full((ROWS, 1, 2), -1, dtype=torch.int16)
    experts[0, 0], experts[3, 0] = torch.tensor([0, 2]), torch.tensor([3, 1])
    hidden, factors = 2 * torch.randn(ROWS, 1, HIDDEN), torch.randn(ROWS, EXPERTS)
    router.entered, router.trains = _pack(experts), True
    weights, _ = router(hidden)
    (weights * factors).sum().backward()

    weight = router.weight.detach().double().requires_grad_()
    logits = hidden[:, 0].double() @ weight.T
    scores = logits.softmax(-1)
    best_group = scores.unflatten(-1, (2, 2)).amax(-1).argmax(-1)
    chosen = torch.stack([2 * best_group, 2 * best_group + 1], -1)  # of two experts a group both
    chosen[[0, 3]] = experts[[0, 3], 0].long()
    expected = torch.zeros(ROWS, EXPERTS, dtype=torch.float64).scatter(1, chosen, SCALING * scores.gather(1, chosen))
    real = ~PADDING
    z_loss = logits[real].logsumexp(-1).square().sum()
    fractions = torch.nn.functional.one_hot(scores[real].topk(2).indices, EXPERTS).sum((0, 1)) / (2 * int(real.sum()))
    balance = EXPERTS * (fractions * scores[real]).sum()
    ((expected * factors).sum() + Z_COEFFICIENT * z_loss + BALANCE_COEFFICIENT * balance).backward()
    stop_parallel()
    return {
        "weights": (weights.detach(), expected.detach()),
        "gradient": (router.weight.grad, weight.grad),
        "z_loss": (router.sums["moe/z_loss"][0], z_loss.detach()),
        "balance": (router.sums["moe/seq_aux_loss"][0], balance.detach()),
        "recorded": weights.detach()[[0, 0, 3, 3], [0, 2, 3, 1]],
    }


def test_deepseek_v2_takes_recorded_experts_of_any_group_and_regularises_all_experts() -> None:
    """In float64 by arXiv 2405.04434, section 2.2.2: weights are softmax scores over all experts, recorded or not; z-loss and balance see all logits."""
    found = run_ranks(_best_groups, 1, timeout_s=60)[0]
    assert (found.pop("recorded") > 1e-3).all()
    for name, (actual, expected) in found.items():
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
