"""Every method that the configuration can name reaches the gradient that its formula says, and the same one in every layout.

The oracle is transformers in float64: log-probs and entropies of the recorded samples, plain loops over samples and actions for advantages
and weights, autograd for the gradient. Its norm is compared with `optimizer/grad_norm`. A gradient norm is one number, but no weight, mask or
sum can be wrong in the runs below without changing it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from otb_megatron.rollout.recording import load_rollouts, save_rollouts
from otb_megatron.types import Sample
from tests.distributed.training import Outcome, largest_difference, record_samples, settings, train
from tests.models import VOCAB_SIZE, make_model

TEMPERATURE = 0.9
MAX_TOKENS = 14  # longest recorded response


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and two steps of recorded samples with greedy rewards. Sampling log-probs are those of the model, but for noise of 0.4 nats."""
    directory = tmp_path_factory.mktemp("methods")
    make_model(directory / "model", "qwen3_tied")
    record_samples(directory / "rollouts", vocab_size=VOCAB_SIZE, num_steps=2)
    generator = torch.Generator().manual_seed(0)
    for step in (1, 2):
        samples = load_rollouts(directory / "rollouts", step)
        scored = Scored.of(_load(directory / "model"), samples)
        noisy = []
        for sample, log_prob in zip(samples, scored.log_prob, strict=True):
            log_probs = tuple((log_prob.detach() + 0.4 * torch.randn(log_prob.numel(), generator=generator)).tolist())
            greedy = (0.0, 0.5, 1.0)[sample.group % 3]
            noisy.append(dataclasses.replace(sample, response=dataclasses.replace(sample.response, log_probs=log_probs), greedy_reward=greedy))
        save_rollouts(directory / "rollouts", step, noisy)
    return directory


def _load(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()


def _moved(work: Path, run: Outcome) -> Any:
    """The model with the weights that the run ended with."""
    model = _load(work / "model")
    model.load_state_dict({name: tensor.double() for name, tensor in run.weights.items()}, strict=False)
    model.tie_weights()
    return model


@dataclass(frozen=True)
class Scored:
    """Samples and what a model says about them; the lists are [samples] of [actions]."""

    model: Any
    samples: list[Sample]
    log_prob: list[Tensor]
    entropy: list[Tensor]
    energy: list[Tensor]

    @classmethod
    def of(cls, model: Any, samples: list[Sample]) -> Scored:
        log_prob, entropy, energy = [], [], []
        for sample in samples:
            prompt, response = sample.prompt.token_ids, sample.response.token_ids
            rows = torch.log_softmax(model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE, -1)
            chosen = torch.nn.functional.one_hot(torch.tensor(response), rows.shape[1])
            log_prob.append((rows * chosen).sum(-1))
            entropy.append(-(rows.exp() * rows).sum(-1))
            energy.append((chosen - rows.exp()).square().sum(-1).detach())
        return cls(model, samples, log_prob, entropy, energy)

    @property
    def num_actions(self) -> int:
        return sum(log_prob.numel() for log_prob in self.log_prob)

    def ratios(self) -> list[Tensor]:
        """rho of every action."""
        return [(own.detach() - torch.tensor(s.response.log_probs, dtype=torch.float64)).exp() for own, s in zip(self.log_prob, self.samples, strict=True)]

    def rloo(self, returns: list[float]) -> list[float]:
        """Return less the mean return of the other members of the group."""
        groups = [sample.group for sample in self.samples]
        others = [[r for j, r in enumerate(returns) if groups[j] == groups[i] and j != i] for i in range(len(returns))]
        return [own - sum(rest) / len(rest) for own, rest in zip(returns, others, strict=True)]

    def grad_norm(self, loss: Tensor) -> float:
        gradients = torch.autograd.grad(loss, list(self.model.parameters()), retain_graph=True)
        return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))

    def policy_loss(self, factors: list[Tensor]) -> Tensor:
        """-sum of factor * log-prob / actions; a factor is advantage times weight, [samples] of [actions] or of one number."""
        return -sum((factor * log_prob).sum() for factor, log_prob in zip(factors, self.log_prob, strict=True)) / self.num_actions


@pytest.fixture(scope="module")
def scored(work: Path) -> Scored:
    return Scored.of(_load(work / "model"), load_rollouts(work / "rollouts", 1))


def _run(work: Path, output: Path, *, num_steps: int = 1, world_size: int = 1, **sections: dict[str, Any]) -> Any:
    trainer = {"num_steps": num_steps, "output_dir": str(output), "max_tokens_per_microbatch": 64, "deadline_s": 60}
    sections["rollout"] = {"max_response_tokens": MAX_TOKENS} | sections.get("rollout", {})
    return train(settings(work / "model", work, **sections, trainer=trainer), world_size)


def _outcome_rewards(scored: Scored) -> list[float]:
    return [sample.reward for sample in scored.samples]


def _corrected(weights: Callable[[Tensor], Tensor]) -> Callable[[Scored], Tensor]:
    """The policy loss with a correction weight, and the entropy bonus of 0.1 on what is not rejected."""

    def loss(scored: Scored) -> Tensor:
        c = [weights(ratio) for ratio in scored.ratios()]
        factors = [a * weight for a, weight in zip(scored.rloo(_outcome_rewards(scored)), c, strict=True)]
        bonus = sum((entropy * (weight != 0)).sum() for entropy, weight in zip(scored.entropy, c, strict=True)) / scored.num_actions
        return scored.policy_loss(factors) - 0.1 * bonus

    return loss


def _otb(scored: Scored, returns: list[Tensor], weights: list[Tensor] | None = None) -> list[Tensor]:
    """Advantages: a group's live responses at step t share B_t, whose energies count with the square of the weight; one alone has none (tail: zero)."""
    weights = weights or [torch.ones_like(energy) for energy in scored.energy]
    realized = [(w * c.square()).cumsum(0) for w, c in zip(scored.energy, weights, strict=True)]
    advantages = [g.clone() for g in returns]
    for i, sample in enumerate(scored.samples):
        for t in range(len(advantages[i])):
            alive = [j for j, other in enumerate(scored.samples) if other.group == sample.group and len(weights[j]) > t]
            total = sum(realized[j][t] for j in alive)
            if len(alive) > 1 and total > 0:
                advantages[i][t] -= sum(returns[j][t] * realized[j][t] for j in alive) / total
            elif len(alive) > 1:
                advantages[i][t] -= sum(returns[j][t] for j in alive) / len(alive)
    return advantages


def _otb_with_mask(scored: Scored) -> Tensor:
    weights = [torch.where((ratio >= 0.7) & (ratio <= 1.4), ratio, 0.0) for ratio in scored.ratios()]
    returns = [torch.full_like(w, sample.reward) for w, sample in zip(weights, scored.samples, strict=True)]
    return scored.policy_loss([a * w for a, w in zip(_otb(scored, returns, weights), weights, strict=True)])


def _overlong(scored: Scored) -> Tensor:
    """Equation 13 with a buffer of 8 below 14 tokens: (6 - length) / 8 from length 6 on."""
    returns = [s.reward + min(0.0, (6 - len(s.response.token_ids)) / 8) for s in scored.samples]
    return scored.policy_loss([torch.tensor(a) for a in scored.rloo(returns)])


def _covariance(scored: Scored, advantages: list[float]) -> list[Tensor]:
    log_prob = torch.cat(scored.log_prob).detach()
    at_action = torch.cat([torch.full_like(lp.detach(), a) for lp, a in zip(scored.log_prob, advantages, strict=True)])
    covariance = (at_action - at_action.mean()) * (log_prob - log_prob.mean())
    return list(covariance.split([lp.numel() for lp in scored.log_prob]))


def _clip_cov(scored: Scored) -> Tensor:
    """All tokens between the bounds are selected, since the fraction is 1, and have no gradient."""
    advantages = scored.rloo(_outcome_rewards(scored))
    kept = [~((cov > 0.1) & (cov < 2.0)) for cov in _covariance(scored, advantages)]
    assert 10 < sum(int((~k).sum()) for k in kept) < scored.num_actions - 10
    return scored.policy_loss([a * k for a, k in zip(advantages, kept, strict=True)])


def _vapo(scored: Scored) -> Tensor:
    """Plus 0.3 times the mean negative log-likelihood of the tokens of right answers."""
    right = [s.reward > 0 for s in scored.samples]
    tokens = sum(lp.numel() for lp, positive in zip(scored.log_prob, right, strict=True) if positive)
    nll = -sum(lp.sum() for lp, positive in zip(scored.log_prob, right, strict=True) if positive) / tokens
    return scored.policy_loss([torch.tensor(a) for a in scored.rloo(_outcome_rewards(scored))]) + 0.3 * nll


def _remax(scored: Scored) -> Tensor:
    return scored.policy_loss([torch.tensor(s.reward - (0.0, 0.5, 1.0)[s.group % 3]) for s in scored.samples])


def _whitened(scored: Scored) -> Tensor:
    """Mean 0 and sample variance 1 over actions, not over responses."""
    advantages = scored.rloo(_outcome_rewards(scored))
    at_action = torch.cat([torch.full_like(lp.detach(), a) for lp, a in zip(scored.log_prob, advantages, strict=True)])
    return scored.policy_loss([(a - at_action.mean()) / at_action.std() for a in advantages])


def _trust_region(ratio: Tensor) -> Tensor:
    return torch.ones_like(ratio) * bool(((ratio - 1 - ratio.log()) <= 0.25).all())


def _within_geometric_mean(ratio: Tensor) -> Tensor:
    return torch.ones_like(ratio) * bool(0.9 <= ratio.log().mean().exp() <= 1.2)


RLOO = {"advantage": "rloo"}
CORRECTED = {"advantage": "rloo", "entropy_coef": 0.1}
CASES: dict[str, tuple[dict[str, dict[str, Any]], Callable[[Scored], Tensor]]] = {
    "none": ({"algorithm": CORRECTED}, _corrected(torch.ones_like)),
    "truncated": (
        {"algorithm": CORRECTED | {"rollout_correction": "truncated", "rollout_correction_options": {"clip": 1.1}}},
        _corrected(lambda ratio: ratio.clamp(max=1.1)),
    ),
    "truncated_sequence": (
        {"algorithm": CORRECTED | {"rollout_correction": "truncated_sequence", "rollout_correction_options": {"clip": 3}}},
        _corrected(lambda ratio: ratio.prod().clamp(max=3.0).expand_as(ratio)),
    ),
    "truncated_geometric": (
        {"algorithm": CORRECTED | {"rollout_correction": "truncated_geometric"}},
        _corrected(lambda ratio: ratio.log().mean().exp().clamp(max=2.0).expand_as(ratio)),
    ),
    "masked": (
        {"algorithm": CORRECTED | {"rollout_correction": "masked", "rollout_correction_options": {"low": 0.7, "high": 1.4}}},
        _corrected(lambda ratio: torch.where((ratio >= 0.7) & (ratio <= 1.4), ratio, 0.0)),
    ),
    "masked_sequence": (
        {"algorithm": CORRECTED | {"rollout_correction": "masked_sequence", "rollout_correction_options": {"low": 0.9, "high": 1.2}}},
        _corrected(_within_geometric_mean),
    ),
    "trust_region": (
        {"algorithm": CORRECTED | {"rollout_correction": "trust_region", "rollout_correction_options": {"max_token_kl": 0.25}}},
        _corrected(_trust_region),
    ),
    "otb with mask": ({"algorithm": {"rollout_correction": "masked", "rollout_correction_options": {"low": 0.7, "high": 1.4}}}, _otb_with_mask),
    "overlong": ({"algorithm": RLOO, "rewards": {"overlong_buffer_tokens": 8}}, _overlong),
    "clip_cov": (
        {"algorithm": RLOO | {"loss": "clip_cov", "loss_options": {"selected_fraction": 1.0, "covariance_low": 0.1, "covariance_high": 2.0}}},
        _clip_cov,
    ),
    "vapo": ({"algorithm": RLOO | {"loss": "vapo", "loss_options": {"nll_coef": 0.3}}}, _vapo),
    "remax": ({"algorithm": {"advantage": "remax"}}, _remax),
    "whitened": ({"algorithm": RLOO | {"whiten_advantages": True}}, _whitened),
}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_the_formula(work: Path, scored: Scored, tmp_path: Path, case: str) -> None:
    sections, loss = CASES[case]
    (metrics,) = _run(work, tmp_path / "run", **sections).metrics
    assert metrics["optimizer/grad_norm"] == pytest.approx(scored.grad_norm(loss(scored)), rel=2e-5)


def test_no_two_cases_have_the_same_gradient(scored: Scored) -> None:
    """Or the test above could not tell one method from another."""
    norms = sorted(scored.grad_norm(loss(scored)) for _, loss in CASES.values())
    assert all(right / left > 1.001 for left, right in zip(norms, norms[1:], strict=False)), norms


def test_kl_in_the_reward(work: Path, scored: Scored, tmp_path: Path) -> None:
    """The second step, whose policy has left the reference: G_t = R - coef * sum of d from t on, its baseline as OTB has it under full energies.

    Steered: the first step's KL is 0, so its 15 samples lower the coefficient by the bound of a fifth of 15 / 30.
    """
    algorithm = {"reward_kl": {"coef": 0.2, "estimator": "k2", "adaptive": {"target": 0.05, "horizon": 30}}}
    first = _run(work, tmp_path / "first", algorithm=algorithm)
    both = _run(work, tmp_path / "both", num_steps=2, algorithm=algorithm)
    assert [step["rewards/kl_coef"] for step in both.metrics] == pytest.approx([0.2, 0.2 * (1 - 0.2 * 15 / 30)])
    assert both.metrics[0]["rewards/kl"] == pytest.approx(0.0, abs=1e-12)

    samples = load_rollouts(work / "rollouts", 2)
    reference = Scored.of(_load(work / "model"), samples)
    policy = Scored.of(_moved(work, first), samples)
    kl = [(own - ref).detach().square() / 2 for own, ref in zip(policy.log_prob, reference.log_prob, strict=True)]
    assert both.metrics[1]["rewards/kl"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-4) and both.metrics[1]["rewards/kl"] > 0.01
    returns = [s.reward - 0.18 * k.flip(0).cumsum(0).flip(0) for s, k in zip(samples, kl, strict=True)]
    expected = _otb(policy, returns)
    torch.testing.assert_close(both.advantages[1].double(), torch.cat(expected), rtol=0, atol=2e-5)
    assert both.metrics[1]["optimizer/grad_norm"] == pytest.approx(policy.grad_norm(policy.policy_loss(expected)), rel=1e-4)


def test_a_resumed_run_continues_with_the_coefficient_it_had(work: Path, tmp_path: Path) -> None:
    """One step, then one more from its checkpoint: the second is that of a run of two steps, number for number."""
    algorithm = {"reward_kl": {"coef": 0.2, "adaptive": {"target": 0.05, "horizon": 30}}, "loss": "clip_cov", "loss_options": {"selected_fraction": 0.1}}
    algorithm["loss_options"] |= {"covariance_low": 0.0, "covariance_high": 9.0}  # draws a tenth of about a half, from the step's number
    whole = _run(work, tmp_path / "whole", num_steps=2, algorithm=algorithm)
    _run(work, tmp_path / "parts", num_steps=1, algorithm=algorithm)
    resumed = _run(work, tmp_path / "parts", num_steps=2, algorithm=algorithm)
    second = [{name: value for name, value in run.metrics[1].items() if not name.startswith("time/")} for run in (whole, resumed)]
    assert second[0] == second[1] and second[0]["rewards/kl_coef"] == pytest.approx(0.18)
    assert largest_difference(resumed.weights, whole.weights) == 0.0


def _gspo(scored: Scored, old: list[Tensor], low: float, high: float) -> Tensor:
    """-mean over responses of min(s A, clip(s) A), s differentiable; some of the responses are clipped and some are not."""
    ratios = [(own - before.detach()).mean().exp() for own, before in zip(scored.log_prob, old, strict=True)]
    gains = [(s * a, s.clamp(1 - low, 1 + high) * a) for s, a in zip(ratios, scored.rloo(_outcome_rewards(scored)), strict=True)]
    clipped = sum(bool(bounded < plain) for plain, bounded in gains)
    assert 0 < clipped < len(gains) - 2
    return -sum(torch.minimum(*gain) for gain in gains) / len(gains)


def test_gspo_compares_whole_responses(work: Path, tmp_path: Path) -> None:
    """The second of two optimizer steps on one part each. The rate falls to 0 for it, so the run ends with the weights that its gradient was taken at."""
    algorithm = RLOO | {"loss": "gspo", "loss_options": {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}, "aggregation": "seq-mean-token-mean"}
    schedule = {"lr": 1e-3, "lr_decay_style": "linear", "clip_grad": 0.0}
    run = _run(work, tmp_path / "run", algorithm=algorithm | {"optimizer_steps_per_rollout": 2}, optimizer=schedule)
    samples = load_rollouts(work / "rollouts", 1)
    groups = sorted({sample.group for sample in samples})
    second = [sample for sample in samples if sample.group in groups[(len(groups) + 1) // 2 :]]
    old = Scored.of(_load(work / "model"), second).log_prob
    policy = Scored.of(_moved(work, run), second)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in run.gradients[1].values()))
    assert norm == pytest.approx(policy.grad_norm(_gspo(policy, old, 0.03, 0.04)), rel=1e-4)


def test_kl_cov_penalises_the_selected_tokens(work: Path, tmp_path: Path) -> None:
    """The penalty has no gradient where the policy has not moved yet: of two optimizer steps on one part each, the second shows it."""
    runs = []
    for coef in (0.0, 50.0):
        algorithm = RLOO | {"loss": "kl_cov", "loss_options": {"kl_coef": coef, "selected_fraction": 0.5}, "optimizer_steps_per_rollout": 2}
        runs.append(_run(work, tmp_path / str(coef), algorithm=algorithm, optimizer={"clip_grad": 0.0}))
    assert runs[0].metrics[0]["policy/selected_fraction"] == pytest.approx(0.5, abs=0.02)
    assert runs[1].metrics[0]["optimizer/grad_norm"] > 1.5 * runs[0].metrics[0]["optimizer/grad_norm"]


GLOBAL = {
    "clip_cov, masks, whitening, KL and length in the reward": {
        "algorithm": {
            "loss": "clip_cov",
            "loss_options": {"selected_fraction": 0.2, "covariance_low": 0.1, "covariance_high": 9.0},
            "rollout_correction": "masked",
            "rollout_correction_options": {"low": 0.7, "high": 1.4},
            "whiten_advantages": True,
            "reward_kl": {"coef": 0.1, "adaptive": {"target": 0.05, "horizon": 30}},
            "entropy_coef": 0.01,
            "kl_coef": 0.1,
            "optimizer_steps_per_rollout": 2,
        },
        "rewards": {"overlong_buffer_tokens": 8},
    },
    "kl_cov, remax, sequence weights": {
        "algorithm": {
            "advantage": "remax",
            "loss": "kl_cov",
            "loss_options": {"selected_fraction": 0.2},
            "rollout_correction": "truncated_sequence",
            "optimizer_steps_per_rollout": 2,
        }
    },
    "vapo, trust region": {
        "algorithm": {
            "advantage": "optimal_token_baseline_loo",
            "loss": "vapo",
            "rollout_correction": "trust_region",
            "rollout_correction_options": {"max_token_kl": 0.25},
            "optimizer_steps_per_rollout": 2,
        }
    },
}


@pytest.mark.parametrize("methods", GLOBAL)
def test_statistics_of_the_whole_step_are_free_of_the_layout(work: Path, tmp_path: Path, methods: str) -> None:
    """Two steps of two optimizer steps: one process against DP2 and CP2, every metric and every weight."""
    one = _run(work, tmp_path / "one", num_steps=2, **GLOBAL[methods])
    for name, parallel in (("dp2", {}), ("cp2", {"context_parallel_size": 2})):
        other = _run(work, tmp_path / name, num_steps=2, world_size=2, parallel=parallel, **GLOBAL[methods])
        for got, want in zip(other.metrics, one.metrics, strict=True):
            assert got.keys() == want.keys()
            for metric in want:
                if not metric.startswith("time/"):
                    assert got[metric] == pytest.approx(want[metric], rel=1e-4, abs=1e-5), (name, metric)
        assert largest_difference(other.weights, one.weights) < 5e-5, name


def test_every_metric_of_a_run_is_documented(work: Path, tmp_path: Path) -> None:
    """docs/metrics.md names each, those of energy by position as a family."""
    documented = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for number, sections in enumerate(GLOBAL.values()):
        (metrics,) = _run(work, tmp_path / str(number), **sections).metrics
        named = {name for name in metrics if name != "step" and not name.startswith("energy/position_")}
        assert [name for name in sorted(named) if f"`{name}`" not in documented] == []
        assert [name for name in metrics if name.startswith("energy/position_")] == [f"energy/position_{start}" for start in (0, 12, 4, 8)]
