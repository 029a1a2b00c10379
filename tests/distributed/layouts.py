"""The parallel layouts that must all compute what one process computes, and how far from it each one is.

One table serves the tests, `make test-layouts` and docs/parallelism.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed.training import NUM_STEPS, Outcome, largest_difference, largest_metric_difference, record_samples, settings, train
from tests.models import VOCAB_SIZE, make_model

TOLERANCE = 1e-5
MODELS = {"dense": "qwen3_tied", "MoE": "qwen3_moe"}  # by their kind in tests.models
DENSE, MOE = MODELS

Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Layout:
    """A way to run the same training."""

    name: str
    world_size: int
    sections: Sections  # of the configuration, merged over that of one process
    models: tuple[str, ...] = (DENSE, MOE)
    quick: tuple[str, ...] = ()  # of those, the ones in `make test`


def _layout(
    name: str,
    world_size: int,
    *,
    tp: int = 1,
    sp: bool = False,
    pp: int = 1,
    vpp: int | None = None,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    models: tuple[str, ...] = (DENSE, MOE),
    quick: tuple[str, ...] = (),
    **sections: dict[str, Any],
) -> Layout:
    parallel = dict(
        tensor_model_parallel_size=tp,
        sequence_parallel=sp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    return Layout(name, world_size, {"parallel": parallel, **sections}, models, quick)


_BOTH = (DENSE, MOE)
_REPLICATED = {"use_distributed_optimizer": False}
_FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
_SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective"}

LAYOUTS = (
    _layout("TP2", 2, tp=2, models=(DENSE,), quick=(DENSE,)),
    _layout("TP2 + SP", 2, tp=2, sp=True, quick=_BOTH),
    _layout("TP4", 4, tp=4, models=(DENSE,)),
    _layout("TP4 + SP", 4, tp=4, sp=True),
    _layout("PP2", 2, pp=2, quick=_BOTH),
    _layout("PP4", 4, pp=4, quick=(DENSE,)),
    _layout("PP2, 2 virtual stages", 2, pp=2, vpp=2, quick=_BOTH),
    _layout("PP2, 1 + 3 layers", 2, pp=2, megatron={"num_layers_in_first_pipeline_stage": 1}, quick=(DENSE,)),
    _layout("PP3, 1 + 2 + 1 layers", 3, pp=3, megatron={"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}),
    _layout("PP3, embedding and loss count as layers", 3, pp=3, megatron={f"account_for_{what}_in_pipeline_split": True for what in ("embedding", "loss")}),
    _layout("PP2, 2 virtual stages, 1, 2, 1, 0 layers", 2, pp=2, vpp=2, megatron={"pipeline_model_parallel_layout": "Et|tt|t|L"}),
    _layout("CP2", 2, cp=2, quick=_BOTH),
    _layout("CP4", 4, cp=4),
    _layout("DP2", 2, quick=_BOTH),
    _layout("DP2, replicated optimizer", 2, optimizer=_REPLICATED, quick=(DENSE,)),
    _layout("DP4", 4),
    _layout("DP4, replicated optimizer", 4, optimizer=_REPLICATED),
    _layout("TP2 x PP2", 4, tp=2, pp=2, models=(DENSE,), quick=(DENSE,)),
    _layout("TP2 + SP x PP2", 4, tp=2, sp=True, pp=2),
    _layout("TP2 + SP x CP2", 4, tp=2, sp=True, cp=2, quick=_BOTH),
    _layout("PP2 x CP2", 4, pp=2, cp=2),
    _layout("TP2 x PP2 x CP2", 8, tp=2, pp=2, cp=2, models=(DENSE,)),
    _layout("TP2 + SP x PP2 x CP2", 8, tp=2, sp=True, pp=2, cp=2),
    _layout("DP2 x TP2", 4, tp=2, models=(DENSE,)),
    _layout("DP2 x TP2 + SP", 4, tp=2, sp=True),
    _layout("DP2 x PP2", 4, pp=2),
    _layout("DP2 x PP2, replicated optimizer", 4, pp=2, optimizer=_REPLICATED),
    _layout("DP2 x PP2, 2 virtual stages", 4, pp=2, vpp=2),
    _layout("DP2 x CP2", 4, cp=2),
    _layout("DP2 x TP2 + SP x PP2", 8, tp=2, sp=True, pp=2),
    _layout("EP2", 2, ep=2, models=(MOE,), quick=(MOE,)),
    _layout("EP2, replicated optimizer", 2, ep=2, models=(MOE,), optimizer=_REPLICATED),
    _layout("EP4", 4, ep=4, models=(MOE,), quick=(MOE,)),
    _layout("EP2 x DP2", 4, ep=2, models=(MOE,)),
    _layout("TP2 + SP, EP2", 2, tp=2, sp=True, ep=2, models=(MOE,), quick=(MOE,)),
    _layout("PP2, EP2", 4, pp=2, ep=2, models=(MOE,), quick=(MOE,)),
    _layout("CP2, EP2", 2, cp=2, ep=2, models=(MOE,)),
    _layout("TP2 + SP x CP2, EP2", 4, tp=2, sp=True, cp=2, ep=2, models=(MOE,), quick=(MOE,)),
    _layout("TP2 + SP, expert TP2", 2, tp=2, sp=True, etp=2, models=(MOE,), quick=(MOE,)),
    _layout("DP2 x TP2 + SP, EP2, expert TP2", 4, tp=2, sp=True, ep=2, etp=2, models=(MOE,)),
    _layout("EP2, allgather", 2, ep=2, models=(MOE,), megatron=_ALLGATHER, quick=(MOE,)),
    _layout("TP2 + SP x CP2, EP2, allgather", 4, tp=2, sp=True, cp=2, ep=2, models=(MOE,), megatron=_ALLGATHER),
    _layout("PP2, EP2, allgather", 4, pp=2, ep=2, models=(MOE,), megatron=_ALLGATHER),
    _layout("DP2 x TP2 + SP, EP2, expert TP2, allgather", 4, tp=2, sp=True, ep=2, etp=2, models=(MOE,), megatron=_ALLGATHER),
    _layout("full recompute", 1, megatron=_FULL_RECOMPUTE, quick=_BOTH),
    _layout("recompute of blocks", 1, megatron=_FULL_RECOMPUTE | {"recompute_method": "block", "recompute_num_layers": 2}),
    _layout("recompute of attention and MLP", 1, models=(DENSE,), megatron=_SELECTIVE_RECOMPUTE | {"recompute_modules": ["core_attn", "mlp"]}, quick=(DENSE,)),
    _layout("recompute of attention and experts", 1, models=(MOE,), megatron=_SELECTIVE_RECOMPUTE | {"recompute_modules": ["core_attn", "moe"]}, quick=(MOE,)),
    _layout("TP2 + SP x PP2, full recompute", 4, tp=2, sp=True, pp=2, megatron=_FULL_RECOMPUTE),
    _layout("PP2 x CP2, 2 virtual stages, full recompute", 4, pp=2, vpp=2, cp=2, megatron=_FULL_RECOMPUTE),
)  # fmt: skip
CASES = tuple((layout, model) for layout in LAYOUTS for model in layout.models)
QUICK_CASES = tuple((layout, model) for layout in LAYOUTS for model in layout.quick)


@dataclass(frozen=True)
class Reference:
    """The recorded samples, and what one process computes from them."""

    model: str  # DENSE or MOE, or a kind of tests.models
    work_dir: Path  # holds the model and the recording
    outcome: Outcome

    @classmethod
    def of(cls, model: str, work_dir: Path) -> Reference:
        work_dir.mkdir(exist_ok=True)
        make_model(work_dir / "model", MODELS.get(model, model))
        record_samples(work_dir / "rollouts", vocab_size=VOCAB_SIZE)
        return cls(model, work_dir, train(settings(work_dir / "model", work_dir), 1))

    def run(self, output_dir: Path, sections: Sections, world_size: int = 1) -> Outcome:
        """The same training with `sections` merged over the configuration."""
        values = settings(self.work_dir / "model", self.work_dir)
        for name, entries in sections.items():
            values[name] = values.get(name, {}) | entries
        values["trainer"]["output_dir"] = str(output_dir)
        return train(values, world_size)


@dataclass(frozen=True)
class Difference:
    """How far an outcome is from that of one process, relative, each the largest of all steps and tensors.

    A tensor's difference is its norm relative to the tensor's, |found - expected| / |expected|. Element by element nothing could hold:
    where the terms of a gradient nearly cancel, rounding is all that is left of it.
    """

    advantages: float
    first_gradient: float  # as the optimizer gets it, before clipping
    gradient: float  # of every step: later ones are taken at weights that Adam has moved apart, by its division by the gradient's own size
    metrics: float
    weights: float  # after the last step

    @classmethod
    def between(cls, found: Outcome, expected: Outcome) -> Difference:
        assert len(found.advantages) == len(expected.advantages) and len(found.gradients) == len(expected.gradients) >= NUM_STEPS
        return cls(
            max(largest_difference({"advantages": got}, {"advantages": want}) for got, want in zip(found.advantages, expected.advantages, strict=True)),
            largest_difference(found.gradients[0], expected.gradients[0]),
            max(largest_difference(got, want) for got, want in zip(found.gradients, expected.gradients, strict=True)),
            max(largest_metric_difference(got, want) for got, want in zip(found.metrics, expected.metrics, strict=True)),
            largest_difference(found.weights, expected.weights),
        )

    @property
    def largest(self) -> float:
        return max(vars(self).values())


def measure(layout: Layout, reference: Reference, output_dir: Path) -> Difference:
    """Trains in the layout and compares with one process."""
    return Difference.between(reference.run(output_dir, layout.sections, layout.world_size), reference.outcome)
