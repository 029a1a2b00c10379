"""What an optimizer step minimises: a policy's objective or a critic's. `step.train_step` runs either and alone scales it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor

from otb_megatron.algorithms import LOSSES, kl_estimate, own_options, value_loss
from otb_megatron.config import Config
from otb_megatron.mcore.head import OutputProcessor, StatisticsHead, as_statistics, value_output
from otb_megatron.mcore.model import Model
from otb_megatron.types import LossInputs


@dataclass(frozen=True)
class Terms:
    """An objective's parts for the local actions of a microbatch, under the names of the metrics."""

    total: Tensor  # [local actions], with gradient, what is minimised
    weighted: dict[str, Tensor]  # each [local actions]; reported as the sum of weighted tokens
    averaged: dict[str, Tensor]  # each [local actions]; reported as the mean over actions


class Objective(Protocol):
    optimizer_metrics: ClassVar[str]  # what gradient norm and learning rate are reported under
    router_metrics: ClassVar[str]  # stands before the names of the routers' metrics

    def head(self, model: Model) -> OutputProcessor:
        """What `terms` reads of the model, with the gradients it needs."""

    def terms(self, output: Tensor, inputs: LossInputs, offsets: Tensor) -> Terms:
        """Per-action terms, neither weighted nor summed.

        Args:
            output: [numbers an action, local actions] of the head.
            inputs: of the local actions.
            offsets: [samples + 1] of the microbatch's actions.
        """


@dataclass(frozen=True)
class PolicyObjective:
    """loss - entropy_coef * entropy + kl_coef * KL(policy, reference), per action."""

    optimizer_metrics: ClassVar[str] = "optimizer"
    router_metrics: ClassVar[str] = ""

    loss: str  # a name of LOSSES
    loss_options: dict[str, Any] = field(default_factory=dict)
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    temperature: float = 1.0

    @classmethod
    def of(cls, config: Config) -> PolicyObjective:
        algorithm = config.algorithm
        return cls(algorithm.loss, algorithm.loss_options, algorithm.entropy_coef, algorithm.kl_coef, algorithm.kl_estimator, config.rollout.temperature)

    def head(self, model: Model) -> OutputProcessor:
        return StatisticsHead(model.hf.vocab_size, self.temperature, entropy_grad=self.entropy_coef > 0)

    def terms(self, output: Tensor, inputs: LossInputs, offsets: Tensor) -> Terms:
        policy = as_statistics(output)
        loss = LOSSES[self.loss]
        required = {name: offsets if name == "offsets" else getattr(inputs, name) for name in loss.required}
        options = own_options(loss.function, self.loss_options)
        terms = loss.function(policy.log_prob, inputs.old_log_prob, inputs.advantages, **required, **options)
        per_action = terms.loss if inputs.correction is None else terms.loss * inputs.correction
        weighted = {"loss/policy": per_action}
        total = per_action
        if self.entropy_coef:
            total = total - self.entropy_coef * policy.entropy
        if inputs.reference_log_prob is not None:
            kl = kl_estimate(policy.log_prob, inputs.reference_log_prob, self.kl_estimator)
            weighted["loss/kl"] = kl
            total = total + self.kl_coef * kl
        return Terms(total, weighted | {"loss/total": total}, {f"policy/{name}": value for name, value in terms.metrics.items()})


@dataclass(frozen=True)
class ValueObjective:
    """The critic's clipped squared error, per action."""

    optimizer_metrics: ClassVar[str] = "critic"
    router_metrics: ClassVar[str] = "critic/"

    cliprange_value: float

    def head(self, model: Model) -> OutputProcessor:
        return value_output

    def terms(self, output: Tensor, inputs: LossInputs, offsets: Tensor) -> Terms:
        assert inputs.old_values is not None and inputs.returns is not None
        (values,) = output
        terms = value_loss(values, inputs.old_values, inputs.returns, clip=self.cliprange_value)
        return Terms(terms.loss, {"critic/loss": terms.loss}, {f"critic/{name}": value for name, value in terms.metrics.items()})
