"""How noisy the gradient estimators are on a model of the user's, and how well OTB's energy stands for the size of a score.

Every rank holds the whole model and differentiates the responses to its share of the prompts.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from otb_megatron.algorithms import ADVANTAGES, check_options, choose
from otb_megatron.algorithms.ragged import sums
from otb_megatron.config import AlgorithmConfig, Config
from otb_megatron.data.packing import build_microbatch
from otb_megatron.mcore.bridge import find_bridge
from otb_megatron.mcore.model import build_model, transformer_config, whole_on_one_rank
from otb_megatron.mcore.parallel import Parallel, start_parallel, stop_parallel, world
from otb_megatron.mcore.score import ScoreProbe, Scores
from otb_megatron.mcore.shards import load_weights
from otb_megatron.rewards.registry import resolve
from otb_megatron.rollout.recording import save_rollouts
from otb_megatron.telemetry.console import Countdown, summary_table
from otb_megatron.telemetry.diagnosis import PAGE_FILE, RESULT_FILE, write_diagnosis
from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.telemetry.timing import PhaseTimer
from otb_megatron.trainer.batch import PAD_TOKEN_ID
from otb_megatron.trainer.driver import Driver, found_by_all
from otb_megatron.trainer.score_analysis import PromptScores, ScoredResponses, energy_table, estimator_table, measurable_estimators
from otb_megatron.trainer.source import Engines, prompt_order, read_prompts, recorded_samples
from otb_megatron.trainer.validate import check_replay_dir, check_router_replay, collect, refuse_used
from otb_megatron.types import PolicyStatistics, Sample, Trajectories, UserError
from otb_megatron.weights.architectures import HuggingFaceModel, load_model
from otb_megatron.weights.files import Checkpoint

_OTHER_POLICY = 0.05  # mean difference of log-probs: vLLM and Megatron differ by about 0.01 in bfloat16
_RECORDED_STEP = 1  # sampled by the weights that the recorded run started from


def diagnose_variance(config: Config, output: Path) -> None:
    """Measures the model at `config.model.path` and writes `output`. Every rank of the world calls it; docs/diagnose.md says what comes out.

    Raises:
        UserError: the settings or the recorded samples do not allow it.
    """
    rank, world_size = world()
    with found_by_all(rank):
        hf, whole = _validate(config)
    parallel = start_parallel(whole.parallel, seed=config.trainer.seed, deadline_s=config.trainer.deadline_s)
    try:
        driver = Driver(parallel)
        samples: list[Sample] = driver.share("the samples", driver.run("sampling", lambda: _samples(config, hf, output, world_size)))
        model = build_model(whole, hf, parallel)
        driver.together("loading the weights", lambda: load_weights(model, Checkpoint(hf.path)))
        probe = ScoreProbe(model, temperature=config.rollout.temperature, sketch_size=config.diagnose.sketch_size, seed=config.trainer.seed)
        trajectories = Trajectories.from_samples(samples)
        gathered = driver.gather("the scores", _scores(probe, trajectories, parallel))
        driver.run("the analysis", lambda: _report(config, output, probe, trajectories, gathered))
    finally:
        stop_parallel()


def _validate(config: Config) -> tuple[HuggingFaceModel, Config]:
    """The model, and the configuration that puts all of it on every rank."""
    whole = whole_on_one_rank(config)
    faults: list[str] = []
    hf = collect(faults, lambda: load_model(config.model.path, find_bridge=find_bridge))
    if hf is not None:
        collect(faults, lambda: transformer_config(whole, hf))
        collect(faults, lambda: check_router_replay(config, hf))
    if config.megatron.get("gradient_accumulation_fusion"):
        faults.append("megatron.gradient_accumulation_fusion=true adds gradients up, and here each is wanted alone; set it to false")
    collect(faults, lambda: _check_estimator(config.algorithm))
    collect(faults, lambda: _check_unused(config))
    collect(faults, lambda: check_replay_dir(config))
    if config.rollout.replay_dir is None:
        collect(faults, lambda: resolve(config.rewards.function, config.rewards.options))
        if importlib.util.find_spec("vllm") is None:
            faults.append(
                "there is no vLLM to sample with: install it (`otb-megatron doctor` shows what is there) or set rollout.replay_dir to recorded samples"
            )
    if faults:
        raise UserError("\n".join(faults))
    assert hf is not None
    return hf, whole


def _check_estimator(algorithm: AlgorithmConfig) -> None:
    estimator = choose("advantage", algorithm.advantage, ADVANTAGES)
    check_options("advantage", algorithm.advantage, [estimator.function], algorithm.advantage_options)
    if estimator not in measurable_estimators().values():
        raise UserError(
            f"algorithm.advantage={algorithm.advantage!r} is not measured: it needs {', '.join(sorted(estimator.required))}, and this command has rewards and "
            "energies only; set another one, e.g. algorithm.advantage=optimal_token_baseline"
        )


def _check_unused(config: Config) -> None:
    """What a run does to its rewards, advantages and weights beyond the estimator would change the gradients, and is not done here."""
    algorithm = config.algorithm
    used = {
        "algorithm.reward_kl": algorithm.reward_kl is not None,
        "algorithm.rollout_correction": algorithm.rollout_correction != "none",
        "algorithm.whiten_advantages": algorithm.whiten_advantages,
        "rewards.overlong_buffer_tokens": config.rewards.overlong_buffer_tokens is not None,
    }
    refuse_used(used, "diagnose variance")


def _samples(config: Config, hf: HuggingFaceModel, output: Path, world_size: int) -> list[Sample]:
    """The responses to measure, those to a prompt side by side; sampled if they are not recorded."""
    settings, replay = config.diagnose, config.rollout.replay_dir
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {output}: {error}") from error
    groups = ", ".join(str(size) for size in settings.group_sizes)
    summary_table(
        [
            ("model", f"{hf.path} ({config.model.dtype}), whole on each of {world_size} rank(s)"),
            ("responses", f"{settings.num_prompts} prompts x {settings.num_responses}, {'from ' + str(replay) if replay else 'sampled by vLLM'}"),
            ("groups of", groups),
            ("at most", f"{settings.max_actions} backward passes, one for each response token"),
            ("writes to", str(output)),
        ]
    )
    samples = _sampled(config, output) if replay is None else recorded_samples(config, _RECORDED_STEP)
    return _chosen(samples, config)


def _sampled(config: Config, output: Path) -> list[Sample]:
    prompts = read_prompts(config, config.data.train)
    order = prompt_order(config, prompts)
    chosen = [prompts.prompts[index] for index in order.next(min(config.diagnose.num_prompts, len(prompts.prompts)))]
    engines = Engines(config, load_weights=True)
    try:
        samples = engines.sample(chosen, config.diagnose.num_responses, config.rollout.temperature, Metrics(), PhaseTimer())
    finally:
        engines.close()
    if config.rollout.save:
        save_rollouts(output / "rollouts", _RECORDED_STEP, samples, num_drawn=len(chosen))
    return samples


def _chosen(samples: list[Sample], config: Config) -> list[Sample]:
    """At most the configured number of prompts, responses and actions; whole prompts only."""
    settings = config.diagnose
    by_prompt: dict[int, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.group, []).append(sample)
    needed = 2 * max(settings.group_sizes)
    fewest = min((len(of_prompt) for of_prompt in by_prompt.values()), default=0)
    if fewest < needed:
        raise UserError(
            f"a prompt has {fewest} responses, and groups of {max(settings.group_sizes)} take {needed} (two groups without a common response); "
            f"set diagnose.group_sizes to at most {fewest // 2} or record with rollout.n={needed}"
        )
    if len(by_prompt) < 2:
        raise UserError("there are responses to one prompt only, and an interval takes two at least; set diagnose.num_prompts, or record with more prompts")
    kept, num_actions = [], 0
    for of_prompt in list(by_prompt.values())[: settings.num_prompts]:
        of_prompt = of_prompt[: settings.num_responses]
        num_actions += sum(len(sample.response.token_ids) for sample in of_prompt)
        if num_actions > settings.max_actions:
            break
        kept.append(of_prompt)
    if len(kept) < 2:
        raise UserError(
            f"diagnose.max_actions={settings.max_actions} hold the responses to {len(kept)} prompt(s), and an interval takes two at least; raise it, "
            "or lower diagnose.num_responses or rollout.max_response_tokens"
        )
    return [sample for of_prompt in kept for sample in of_prompt]


def _scores(probe: ScoreProbe, trajectories: Trajectories, parallel: Parallel) -> dict[int, PromptScores]:
    """Of every prompt that falls to this rank."""
    prompts = trajectories.group.unique_consecutive().tolist()
    own = [(index, prompt) for index, prompt in enumerate(prompts) if index % parallel.dp_size == parallel.dp_rank]
    lengths = trajectories.action_offsets.diff()
    countdown, done = None, 0
    if parallel.is_driver:
        total = sum(int(lengths[trajectories.group == prompt].sum()) for _, prompt in own)
        print(f"\nscores of {trajectories.num_actions} tokens in {trajectories.num_samples} responses to {len(prompts)} prompts; {total} on the first rank")
        countdown = Countdown("tokens", total)
    found = {}
    for index, prompt in own:
        of_responses = []
        for sample in (trajectories.group == prompt).nonzero().flatten().tolist():
            of_responses.append(probe.measure(build_microbatch(trajectories, [sample], sequence_multiple=1, total_multiple=1, pad_token_id=PAD_TOKEN_ID)))
            done += int(lengths[sample])
            if countdown is not None:
                countdown.update(done)
        found[index] = _joined(of_responses)
    return found


def _joined(scores: list[Scores]) -> PromptScores:
    def columns(of_response: Callable[[Scores], Tensor]) -> Tensor:
        return torch.cat([of_response(one) for one in scores], -1)

    statistics = PolicyStatistics(*(columns(lambda one, name=name: getattr(one.statistics, name)) for name in ("log_prob", "entropy", "rest")))
    sketch = torch.cat([one.sketch for one in scores]).double()
    return PromptScores(statistics, columns(lambda one: one.squared_norm), columns(lambda one: one.cumulative_squared_norm), sketch @ sketch.t())


def _report(config: Config, output: Path, probe: ScoreProbe, trajectories: Trajectories, gathered: list[dict[int, PromptScores]]) -> None:
    """Analyses the scores of all prompts, writes the files and prints the tables."""
    by_prompt = {index: scores for of_rank in gathered for index, scores in of_rank.items()}
    responses = ScoredResponses.of(trajectories, probe.kinds, [by_prompt[index] for index in range(len(by_prompt))])
    result = {
        "model": {"path": str(config.model.path), "dtype": config.model.dtype, "parameters": probe.num_parameters},
        "settings": config.diagnose.model_dump(mode="json")
        | {
            "temperature": config.rollout.temperature,
            "seed": config.trainer.seed,
            "advantage": config.algorithm.advantage,
            "advantage_options": config.algorithm.advantage_options,
        },
        "data": _facts(responses),
        "sketch": {"size": probe.sketch.size, "error_bound": probe.sketch.relative_error, "measured_error": responses.sketch_error},
        "estimators": estimator_table(responses, config.diagnose, config.algorithm, config.trainer.seed),
        "energy": energy_table(responses),
    }
    tables = write_diagnosis(output, result, responses.energy.numpy(), responses.squared_norm[-1].numpy())
    print(f"\n{tables}")
    summary_table([("all numbers", output / RESULT_FILE), ("pictures", output / PAGE_FILE)])


def _facts(responses: ScoredResponses) -> dict[str, float]:
    trajectories = responses.trajectories
    returns = sums(trajectories.rewards.double(), trajectories.action_offsets)
    prompts = trajectories.group.unique()
    differing = sum(bool((of_prompt != of_prompt[0]).any()) for of_prompt in (returns[trajectories.group == prompt] for prompt in prompts))
    difference = float((responses.log_prob - trajectories.rollout_log_prob).abs().mean())
    if difference > _OTHER_POLICY:
        warnings.warn(
            f"the model gives these responses log-probs that differ from those of their sampling by {difference:.2g} on average: they are not its own, and "
            "expectations over them are not those of its gradient",
            UserWarning,
            stacklevel=2,
        )
    if not differing:
        warnings.warn(
            "no prompt has responses with different rewards: most estimators see nothing to learn here; choose other prompts", UserWarning, stacklevel=2
        )
    return {
        "prompts": prompts.numel(),
        "responses": trajectories.num_samples,
        "tokens": trajectories.num_actions,
        "mean_reward": float(returns.mean()),
        "prompts_with_differing_rewards": differing,
        "log_prob_difference": difference,
    }
