"""Held-out accuracy of a Hugging Face model, without Megatron."""

from __future__ import annotations

from otb_megatron.config import Config
from otb_megatron.trainer.source import Engines, Evaluation
from otb_megatron.types import UserError


def evaluate(config: Config) -> dict[str, float]:
    """Greedy accuracy of the model at `config.model.path` on `config.data.validation`."""
    if config.data.validation is None:
        raise UserError("data.validation is not set; name a held-out source, e.g. data.validation.path=heldout.jsonl")
    engines = Engines(config, load_weights=True)
    try:
        result = Evaluation(config, engines).accuracy()
    finally:
        engines.close()
    return {name.removeprefix("eval/"): value for name, value in result.items()}
