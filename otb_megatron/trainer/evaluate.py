"""Held-out accuracy of a Hugging Face model, without Megatron."""

from __future__ import annotations

from otb_megatron.config import Config
from otb_megatron.trainer.source import Engines, Evaluation, read_prompts
from otb_megatron.types import UserError


def evaluate(config: Config) -> dict[str, float]:
    """Greedy accuracy of the model at `config.model.path` on `config.data.validation`."""
    if config.data.validation is None:
        raise UserError("data.validation is not set; name a held-out source, e.g. data.validation.path=heldout.jsonl")
    prompts = read_prompts(config, config.data.validation)
    engines = Engines(config, load_weights=True)
    try:
        result = Evaluation(engines, prompts).accuracy()
    finally:
        engines.close()
    return {name.removeprefix("eval/"): value for name, value in result.items()}
