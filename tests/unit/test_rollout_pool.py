"""What the pool does with vLLM's answers, and with the machine's GPUs, without either."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from ray.exceptions import RayActorError

from otb_megatron.rollout import calls
from otb_megatron.rollout.cluster import enter, free_gpus
from otb_megatron.rollout.engine import Completion
from otb_megatron.rollout.pool import _prompt_seed, check_records, checked_response
from otb_megatron.types import Prompt, Response, RoutedExperts, UserError

COMPLETION = Completion(token_ids=(5, 1), log_probs=(-0.5, -0.25), finish_reason="stop", weight_versions=("12",))


def test_a_whole_answer_becomes_a_response():
    assert checked_response(7, COMPLETION, "x") == Response((5, 1), (-0.5, -0.25), "x", "stop", 12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": (-0.5,)}, "prompt 7: a response of 2 tokens came with 1 log-probs"),
        ({"log_probs": (-0.5, float("nan"))}, "log-probs that are not finite"),
        ({"log_probs": (float("-inf"), -0.5)}, "log-probs that are not finite"),
        ({"token_ids": (), "log_probs": ()}, "prompt 7: an empty response"),
        ({"finish_reason": None}, "ended with the unknown reason None"),
        ({"finish_reason": "error"}, "ended with the unknown reason 'error'"),
        ({"weight_versions": ()}, r"weight versions \(\)"),
        ({"weight_versions": ("default",)}, "not by one that was sent"),
        ({"weight_versions": ("11", "12")}, r"weight versions \('11', '12'\)"),
    ],
)
def test_nothing_missing_is_filled_in(change, message: str):
    with pytest.raises(RuntimeError, match=message):
        checked_response(7, dataclasses.replace(COMPLETION, **change), "x")


def test_every_token_that_was_computed_has_routed_experts():
    """Three prompt and two response tokens; the last one was drawn and never computed."""
    prompt = Prompt(7, "test", (), (4, 5, 6), "")

    def answered(num_rows: int) -> Completion:
        return dataclasses.replace(COMPLETION, routed_experts=RoutedExperts.of(np.zeros((num_rows, 2, 2), np.uint8)))

    check_records(prompt, [answered(4)])
    assert checked_response(7, answered(4), "x").routed_experts == RoutedExperts("uint8", (4, 2, 2), b"\0" * 16)
    for completion, found in ((answered(3), 3), (answered(5), 5), (COMPLETION, 0)):
        with pytest.raises(RuntimeError, match=f"prompt 7: routed experts of {found} tokens came with a response that has 4 to replay"):
            check_records(prompt, [answered(4), completion])


def test_seeds_of_prompts_lie_apart():
    """vLLM gives response i of a prompt the seed plus i; 2^62 seeds keep 4096 prompts with up to 1000 responses apart."""
    seeds = sorted(_prompt_seed(3, position) for position in range(4096))
    assert all(second - first > 1000 for first, second in zip(seeds, seeds[1:], strict=False))
    assert 0 <= seeds[0] and seeds[-1] < 2**62
    assert _prompt_seed(3, 0) != _prompt_seed(4, 0)


def test_engines_get_the_gpus_after_those_of_the_trainer(monkeypatch: pytest.MonkeyPatch):
    """Local rank r of torchrun uses the r-th visible GPU."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert free_gpus(1) == ["3"]
    assert free_gpus(2) == ["3", "1"]
    with pytest.raises(UserError, match="need 3 GPUs .* beside the trainer's 2, but this machine shows 4"):
        free_gpus(3)


@pytest.mark.parametrize(
    ("address", "message"),
    [("127.0.0.1:1", "no Ray cluster answers there .* set null"), ("head", "give host:port"), ("ray://head:10001", "no Ray cluster answers there")],
)
def test_a_wrong_address_is_refused_at_once(address: str, message: str):
    with pytest.raises(UserError, match=message):
        enter(address, gpus=0, cpus=1)


def test_a_dead_engine_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray says of a lost actor is a table of lines; the user reads the engine's name, what it was doing, and how to go on."""

    def lost(call: object) -> None:
        raise RayActorError(error_msg="The actor died unexpectedly.\n\tclass_name: Engine\n\tpid: 12\nThe worker was ended by SIGKILL.")

    monkeypatch.setattr(calls.ray, "wait", lambda refs, num_returns, timeout: (refs, []))
    monkeypatch.setattr(calls.ray, "get", lost)
    told = r"^engine 1 died while generating: The actor died unexpectedly. class_name: Engine pid: 12 The worker .* SIGKILL. \(.*\). The same command continues"
    with pytest.raises(UserError, match=told):
        calls.wait_for_all({"engine 1": object()}, calls.Deadline(1.0, "rollout.generate_timeout_s"), "generating")
