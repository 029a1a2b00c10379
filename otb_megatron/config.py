"""Every setting of a run, with its one default and its meaning beside it.

`load(file, overrides)` reads a sparse YAML file, applies dotted overrides and validates the result. What a rule
needs to know about algorithms, a model or the machine is checked in `trainer.validate`, before anything starts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from otb_megatron.types import UserError


class Section(BaseModel):
    """A part of the configuration: unknown keys and numbers that are not finite are errors, and values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class ModelConfig(Section):
    path: Path
    """Hugging Face model directory (config.json, safetensors, tokenizer) that the policy starts from."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameter and activation dtype. Optimizer state and gradients are float32 in both cases."""
    make_vocab_size_divisible_by: PositiveInt = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel size; padded columns are masked everywhere."""


class ParallelConfig(Section):
    """Megatron-Core's parallel sizes under its own names. Data parallelism is what remains of the world."""

    tensor_model_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False
    """Shard activations of norms and dropouts over the tensor-parallel group. MoE models with TP > 1 need it."""
    pipeline_model_parallel_size: PositiveInt = 1
    virtual_pipeline_model_parallel_size: int | None = Field(None, ge=2)
    """Model chunks per pipeline stage (interleaved schedule); null for one."""
    context_parallel_size: PositiveInt = 1
    expert_model_parallel_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt = 1

    @model_validator(mode="after")
    def _virtual_stages_are_of_a_pipeline(self) -> ParallelConfig:
        if self.virtual_pipeline_model_parallel_size and self.pipeline_model_parallel_size == 1:
            raise ValueError("`virtual_pipeline_model_parallel_size` needs `pipeline_model_parallel_size` > 1")
        return self

    @property
    def model_parallel_size(self) -> int:
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


class OptimizerConfig(Section):
    """Adam under Megatron-Core's names. Steps are optimizer steps."""

    lr: PositiveFloat = 1e-6
    min_lr: NonNegativeFloat = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    lr_warmup_steps: NonNegativeInt = 0
    lr_decay_steps: PositiveInt | None = None
    """Steps over which the rate decays to `min_lr`; null for the whole run."""
    weight_decay: NonNegativeFloat = 0.01
    """Not applied to norms and biases."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0
    """Bound of the global gradient norm; 0 for none."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks."""
    optimizer_offload_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the optimizer's state and of its update that lives in host memory. Needs a GPU and `use_distributed_optimizer`."""

    @model_validator(mode="after")
    def _offload_is_of_the_distributed_optimizer(self) -> OptimizerConfig:
        if self.optimizer_offload_fraction and not self.use_distributed_optimizer:
            raise ValueError("`optimizer_offload_fraction` > 0 needs `use_distributed_optimizer: true`")
        return self


class SourceConfig(Section):
    """Where prompts come from: exactly one of `path` and `reasoning_gym`."""

    path: Path | None = None
    """A .jsonl or .parquet file in verl's schema, or a directory written by `datasets`' save_to_disk."""
    reasoning_gym: str | None = None
    """Name of a reasoning-gym task, e.g. `chain_sum`."""
    reasoning_gym_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task under reasoning-gym's own names (`seed`, `size`, `min_terms`, ...)."""
    num_rows: PositiveInt | None = None
    """Use only the first rows; null for all."""

    @model_validator(mode="after")
    def _one_source(self) -> SourceConfig:
        if (self.path is None) == (self.reasoning_gym is None):
            raise ValueError("set exactly one of `path` and `reasoning_gym`")
        if self.reasoning_gym_options and self.reasoning_gym is None:
            raise ValueError("`reasoning_gym_options` needs `reasoning_gym`")
        return self


class DataConfig(Section):
    train: SourceConfig
    validation: SourceConfig | None = None
    """Held-out prompts, answered greedily; null for no evaluation."""
    prompts_per_step: PositiveInt = 64
    max_prompt_tokens: PositiveInt = 1024
    overlong_prompts: Literal["filter", "reject"] = "filter"
    """Prompts above `max_prompt_tokens`: counted and left out, or an error that lists them."""
    shuffle: bool = True
    seed: int = 0


class DynamicSamplingConfig(Section):
    """DAPO's dynamic sampling: prompts whose responses all earned the same are replaced by the next ones, until `data.prompts_per_step` are found.

    After the last round the step is as large as what was found, with a warning; the run ends where nothing was found.
    """

    max_rounds: PositiveInt = 10
    """Rounds of sampling in a step; each draws as many prompts as are missing."""
    oversampling: float = Field(1.0, ge=1.0)
    """Times the missing prompts that a round draws. More saves rounds and drops what is found beyond the step's prompts, which is counted."""


class RolloutConfig(Section):
    n: PositiveInt = 8
    """Responses per prompt (N of the group)."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Null trains on every prompt; `{}` replaces those without signal. A replay takes the recorded prompts as they are."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the statistics head divides the logits by it, so log-probs are those of the sampling distribution."""
    max_response_tokens: PositiveInt = 1024
    num_engines: PositiveInt = 1
    """vLLM engines, each a Ray actor."""
    tensor_parallel_size: PositiveInt = 1
    """vLLM's tensor parallelism inside one engine."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine under vLLM's own names, e.g. `gpu_memory_utilization`."""
    ray_address: str | None = None
    """Address of a running Ray cluster (`auto` finds it); null starts one on this machine."""
    start_timeout_s: PositiveFloat = 600.0
    """Deadline for an engine to load its model."""
    generate_timeout_s: PositiveFloat = 1800.0
    """Deadline for the responses of one step."""
    weight_transfer_timeout_s: PositiveFloat = 600.0
    weight_transfer_bucket_bytes: PositiveInt = 256 * 2**20
    """Weights travel in buckets of at most this size (one tensor at least)."""
    router_replay: bool = False
    """MoE models: record the experts that vLLM's routers choose for each token and train through exactly these (verl's router replay R3)."""
    save: bool = False
    """Write every step's samples to `<output_dir>/rollouts`, so that the run can be replayed."""
    replay_dir: Path | None = None
    """Take the samples from the `rollouts` directory of an earlier run instead of sampling: no engine starts."""
    seed: int = 0


class RewardConfig(Section):
    function: str = "math_verify"
    """A name of `rewards.REWARDS`, or `package.module:function` of your own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    timeout_s: PositiveFloat = 10.0
    """Deadline of one call; the worker that exceeds it is killed and replaced."""
    num_workers: PositiveInt = 2
    overlong_buffer_tokens: PositiveInt | None = None
    """DAPO's soft overlong punishment: over the last so many tokens below `rollout.max_response_tokens` the reward falls by up to 1; null for none."""
    max_failures: NonNegativeInt = 0
    """Calls per round of sampling (one a step, but for `rollout.dynamic_sampling`) that may raise, hang or return no finite number before the run stops."""
    failure_reward: float = 0.0
    """Reward of a tolerated failure; each one is counted in the metrics."""


class AdaptiveKLConfig(Section):
    """Moves `coef` towards the value at which the KL is `target` (arXiv 1909.08593, section 2.2). Checkpoints keep where it is."""

    target: PositiveFloat
    """Nats per action, by the same estimator."""
    horizon: PositiveFloat = 10_000.0
    """Samples over which the coefficient moves by a fifth at most; so does a step of more samples."""


class RewardKLConfig(Section):
    """KL against the initial policy, taken off the reward of every action."""

    coef: PositiveFloat = 0.001
    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    adaptive: AdaptiveKLConfig | None = None
    """Null for a fixed coefficient."""


Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class AlgorithmConfig(Section):
    advantage: str = "optimal_token_baseline"
    """A name of `algorithms.ADVANTAGES`."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that function, e.g. `tail: hold`."""
    loss: str = "clipped_surrogate"
    """A name of `algorithms.LOSSES`."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that function, e.g. `clip_ratio_high: 0.28`."""
    aggregation: Aggregation = "token-mean"
    """How per-token losses become one number, under verl's names."""
    aggregation_length: PositiveInt | None = None
    """Fixed normaliser of `seq-mean-token-sum-norm`; null for `rollout.max_response_tokens`."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL loss against the initial policy; 0 for none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    reward_kl: RewardKLConfig | None = None
    """KL inside the reward; null for none. Without it and the KL loss no reference log-probs are computed."""
    whiten_advantages: bool = False
    """Scale the step's advantages to mean 0 and standard deviation 1 over all actions, whatever the estimator."""
    rollout_correction: str = "none"
    """A name of `algorithms.CORRECTIONS`: weights or masks for tokens that trainer and engine give different probabilities."""
    rollout_correction_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that function, e.g. `clip: 2.0` of `truncated`."""
    optimizer_steps_per_rollout: PositiveInt = 1
    """The step's samples are cut into this many parts, one optimizer step each."""


class CriticOptimizerConfig(OptimizerConfig):
    """As the policy's, but for the default of `lr` (verl's)."""

    lr: PositiveFloat = 1e-5


class CriticConfig(Section):
    """The value model. It exists exactly when `algorithm.advantage` needs values (`gae`, `gae_length_adaptive`), and is cut over the ranks as the
    policy is. Its weights, gradients and optimizer state are held beside the policy's."""

    path: Path | None = None
    """Hugging Face model directory that the critic starts from, with or without a value head (`score.weight`, `score.bias`); null for `model.path`."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """Its own, under the same names and with a default `lr` of its own."""
    cliprange_value: PositiveFloat = 0.5
    """A value that moved further than this since the step's first update has no gradient away from there (verl's name)."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of the returns that the critic learns. 1 is VAPO's choice whatever the policy's lambda; verl takes that of the estimator, so set the same here."""
    warmup_steps: NonNegativeInt = 0
    """First steps, in which the critic learns and the policy stays as it is (verl's `critic_warmup`)."""


class TrainerConfig(Section):
    num_steps: PositiveInt = 100
    """Rollout steps of the run."""
    output_dir: Path = Path("runs/default")
    """Everything the run writes lies below: checkpoints, metrics, TensorBoard, report, resolved config."""
    resume: Literal["auto", "never"] = "auto"
    """`auto` continues from the last complete checkpoint in `output_dir`; `never` refuses a directory that holds one."""
    seed: int = 0
    max_tokens_per_microbatch: PositiveInt = 16384
    """Token budget of one packed forward pass on one model replica; a longer sample is packed alone."""
    eval_interval: NonNegativeInt = 0
    """Evaluate every so many steps, before the first and after the last; 0 for before the first and after the last only."""
    deadline_s: PositiveFloat = 3600.0
    """No rank waits longer than this for another one; the error names what it waited for. Above the deadlines of `rollout`."""


class CheckpointConfig(Section):
    interval: NonNegativeInt = 0
    """Save every so many steps and after the last; 0 for after the last only."""
    interval_s: NonNegativeFloat = 0.0
    """Save at the end of a step when this many seconds have passed since the last save; 0 for never. Beside `interval`."""
    keep_last: PositiveInt = 2
    """Older checkpoints are deleted once a newer one is complete."""
    keep_best: bool = False
    """Also save whenever the held-out accuracy after a step is above those after all steps before, and keep that checkpoint;
    `checkpoints/best` names it. The accuracy before the first step does not count: that is `model.path` itself."""
    async_save: bool = False
    """Write in the background while training goes on; costs a copy of a rank's part of the checkpoint in host memory."""


class TelemetryConfig(Section):
    progress: bool = True
    """Progress bar and a line per step on the terminal."""
    tensorboard: bool = True
    wandb_project: str | None = None
    mlflow_tracking_uri: str | None = None


class DiagnoseConfig(Section):
    """What `otb-megatron diagnose variance` measures. Prompts come from `data.train`, responses from the engines or `rollout.replay_dir`."""

    num_prompts: int = Field(16, ge=2)
    """Prompts to answer; confidence intervals come from how they differ."""
    num_responses: PositiveInt = 64
    """Responses to each prompt, at least two groups of the largest size."""
    group_sizes: tuple[int, ...] = (2, 4, 8, 16, 32)
    """The N at which the estimators are compared."""
    max_actions: PositiveInt = 20_000
    """Response tokens at most, each of which takes one backward pass; the last prompts are left out where they have more."""
    num_partitions: PositiveInt = 16
    """How many times the responses to a prompt are split at random into groups of N."""
    sketch_size: PositiveInt = 8192
    """Numbers kept of each token's gradient: a relative error of at most sqrt(2 / sketch_size). From the number of parameters on there is none."""

    @model_validator(mode="after")
    def _groups(self) -> DiagnoseConfig:
        if not self.group_sizes or min(self.group_sizes) < 2:
            raise ValueError(f"group_sizes={list(self.group_sizes)}: a group of one has no baseline; name sizes of 2 and more")
        if self.num_responses < 2 * max(self.group_sizes):
            raise ValueError(
                f"num_responses={self.num_responses} are too few for groups of {max(self.group_sizes)}: a variance takes two groups without a common "
                f"response; set num_responses={2 * max(self.group_sizes)} or smaller group_sizes"
            )
        return self


class Config(Section):
    """A run."""

    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Fields of Megatron-Core's TransformerConfig under its own names, e.g. `recompute_granularity`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig = RolloutConfig()
    rewards: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    diagnose: DiagnoseConfig = DiagnoseConfig()

    def save(self, path: Path) -> None:
        """Writes the resolved configuration as YAML."""
        path.write_text(yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False))


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats: PyYAML's YAML 1.1 reads `1e-4` as text."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$"), list("-+.0123456789"))
_Loader.yaml_implicit_resolvers = {
    first: sorted(resolvers, key=lambda r: r[0] != "tag:yaml.org,2002:int") for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def load(file: Path, overrides: Iterable[str] = ()) -> Config:
    """Reads `file` and applies `overrides`.

    Args:
        file: YAML; sections and keys are those of `Config`, and only what differs from a default need be there.
        overrides: `section.key=value` with a YAML value, applied in order.

    Raises:
        UserError: every unknown key (with the nearest known name), missing key and mistyped value, all at once.
    """
    try:
        values = yaml.load(file.read_text(), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the configuration {file}: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{file} must hold a mapping of sections (model, data, rollout, ...), not {type(values).__name__}")
    for override in overrides:
        _override(values, override)
    return validate(values, str(file))


def validate(values: dict[str, Any], origin: str) -> Config:
    """Checks a nested mapping against `Config`; `origin` names it in the error."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [_explain(fault) for fault in error.errors()]
        raise UserError(f"{origin}: {len(lines)} setting(s) cannot be used:\n" + "\n".join(f"  {line}" for line in lines)) from error


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"override {override!r} is not of the form section.key=value, for example rollout.n=4")
    node = values
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise UserError(f"override {override!r}: {part!r} holds {child!r}, which has no settings below it")
        node = child
    try:
        node[parts[-1]] = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: the value is not valid YAML") from error


def _explain(fault: Any) -> str:
    """One line for one pydantic error: the dotted key, the value, what is wrong and the way out."""
    place = [str(part) for part in fault["loc"]]
    key = ".".join(place)
    if fault["type"] == "extra_forbidden":
        known = sorted(_section(place[:-1]).model_fields)
        near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.5) or [path for path in _all_keys() if path.split(".")[-1] == place[-1]][:1]
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"{key}: unknown key; {hint}"
    if fault["type"] == "missing":
        return f"{key}: required, but not set"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if isinstance(fault["input"], dict) else f"{key}={fault['input']!r}: {message}"


def _section(place: list[str]) -> type[Section]:
    section: type[Section] = Config
    for part in place:
        section = _section_type(section.model_fields[part].annotation)
    return section


def _section_type(annotation: Any) -> Any:
    """The Section inside an annotation such as `SourceConfig | None`, or the annotation itself."""
    candidates = get_args(annotation) if get_origin(annotation) else (annotation,)
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), annotation)


def _all_keys(section: type[Section] = Config, prefix: str = "") -> list[str]:
    keys = []
    for name, info in section.model_fields.items():
        inner = _section_type(info.annotation)
        is_section = isinstance(inner, type) and issubclass(inner, Section)
        keys += _all_keys(inner, f"{prefix}{name}.") if is_section else [prefix + name]
    return keys
