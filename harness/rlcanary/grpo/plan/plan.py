"""The plan of a run: its sections, and what it refuses across them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import PRESETS
from rlcanary.contract.sampling import Sampling
from rlcanary.grpo.plan.learnable import require_one_distribution, require_signal
from rlcanary.grpo.plan.models import LoraSettings, ModelSettings
from rlcanary.grpo.plan.optimizer import OptimizerSettings
from rlcanary.grpo.plan.schedule import Schedule

STRICT = ConfigDict(strict=True, extra="forbid")
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _named(dataset: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(dataset.get("name"), str):
        raise ValueError("name is missing")
    return dataset


# Options of a transformers engine.
BATCHING = {"max_batch_size": int, "min_batch_size": int, "batching_timeout": int | float}
Datasets = Annotated[tuple[Annotated[Mapping[str, Any], AfterValidator(_named)], ...], Field(min_length=1)]


@dataclass(frozen=True, config=STRICT)
class RunSettings:
    """The folder and length of a run.

    Attributes:
        folder: folder of its log, trace and checkpoints; relative to the current folder.
        steps: rollouts, each with its updates.
        seed: seed of weights, data order and sampling.
        threads: threads of torch in the trainer's process.
        device: where the trainer computes; "auto" is the GPU if torch sees one, else the CPU. Engines in this process sample
            on the CPU.
        checkpoint_every: steps between two checkpoints; 0 writes none.
        keep_checkpoints: number of latest checkpoints that stay.
        tensorboard: also write TensorBoard event files.
        audit_every: updates from one that is audited to the next (`rlcanary.live`); 0 audits none.
    """

    folder: Path
    steps: Positive
    # What seeds NumPy, as vLLM does, takes.
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    threads: Positive = 1
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    checkpoint_every: Count = 0
    keep_checkpoints: Positive = 2
    tensorboard: bool = False
    audit_every: Count = 20


@dataclass(frozen=True, config=STRICT)
class DataSettings:
    """The training data.

    Attributes:
        datasets: each has a `name`, "arithmetic", "strings" or a path that ends in .jsonl, and that dataset's options.
        mixing: "weighted" draws each next prompt from a dataset by weight, "sequence" takes one after the other.
        weights: by name of dataset; None weighs all alike. In a sequence, the number of rows of an epoch; None takes all.
        order: a file with the ids that an epoch visits, one a line, in this order; it takes the place of a mixture.
        system_prompt: stands before every conversation that has none of its own.
        answer_prefix: the beginning of each answer, which the policy continues.
        chat_template: render prompts with the tokenizer's template; false encodes their bare text.
    """

    datasets: Datasets
    mixing: Literal["weighted", "sequence"] = "weighted"
    weights: Mapping[str, float] | None = None
    order: Path | None = None
    system_prompt: str = ""
    answer_prefix: str = ""
    chat_template: bool = True


@dataclass(frozen=True, config=STRICT)
class EvaluationSettings:
    """Evaluation as the policy trains, once per prompt, at the temperature of `conventions.evaluation_temperature`.

    Attributes:
        datasets: held-out datasets, as `data.datasets` lists those to train on; prompts are written alike.
        every: steps between two evaluations; the first one is before the first update.
    """

    datasets: Datasets
    every: Positive = 10


@dataclass(frozen=True, config=STRICT)
class EnvironmentSettings:
    """Multi-turn conversations instead of single answers.

    Attributes:
        max_turns: most answers of the policy in a conversation.
        tools: tools that answers can use, by name, each with its options; "python" runs the ```python blocks of an answer.
        tool_role: role of the tools' messages; some chat templates know only "user".
    """

    max_turns: int = 2
    tools: Mapping[str, Any] = field(default_factory=dict)
    tool_role: str = "tool"


@dataclass(frozen=True, config=STRICT)
class SamplerRole:
    """The engines that sample.

    Attributes:
        engine: "transformers" samples in a copy of the model, "vllm" in vLLM.
        replicas: engines beside each other; more than one needs the runtime "ray".
        cpus: CPUs that Ray sets aside for each.
        slots: requests that a replica takes at once.
        requests: "group" asks for all completions of a prompt at once; "completion" for each alone, so that replicas share
            a group. Conversations are always sampled each alone.
        request_timeout_s: a request that takes longer has failed and is tried again; None waits for ever.
        options: passed to vLLM's engine as they are; of a transformers engine `max_batch_size`, rows of a forward pass, and
            `min_batch_size` and `batching_timeout`: requests that share a batch, and the seconds that they wait for others.
    """

    engine: Literal["transformers", "vllm"] = "transformers"
    replicas: Positive = 1
    cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    slots: Positive = 64
    requests: Literal["group", "completion"] = "group"
    request_timeout_s: Seconds | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.engine == "transformers":
            for name, value in self.options.items():
                if name not in BATCHING:
                    raise ValueError(f"options of a transformers engine are {', '.join(BATCHING)}, not {name!r}")
                is_number = isinstance(value, BATCHING[name]) and not isinstance(value, bool)
                if not is_number or not (name != "batching_timeout") <= value < math.inf:
                    raise ValueError(f"options: {name} is {value!r}, it has to be a number, and of rows at least 1")


@dataclass(frozen=True, config=STRICT)
class VerifierRole:
    """The verifiers that judge completions; each row of a dataset names its verifier.

    Attributes:
        workers: processes per verifier, actors on Ray. 0 judges in the trainer's process, where nothing ends a call that
            hangs; None gives a process to each verifier that can hang, such as math.
        timeout_s: limit of one judgement by a worker. A timeout is not a reward of zero: its group is sampled again.
        options: arguments of verifiers, by name.
    """

    workers: Count | None = None
    timeout_s: Seconds = 10.0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, config=STRICT)
class Roles:
    """The roles of a run."""

    sampler: SamplerRole = field(default_factory=SamplerRole)
    verifier: VerifierRole = field(default_factory=VerifierRole)


@dataclass(frozen=True, config=STRICT)
class Runtime:
    """The place where the roles run.

    Attributes:
        kind: "local" is this process; "ray" puts every sampler into an actor.
        address: address of a running Ray cluster; None starts one of the run's own and ends it afterwards.
        transport: transport of weights to the samplers; None takes the one that fits the runtime and the engine.
        start_timeout_s: an engine that has not started by then has failed.
        sync_timeout_s: an engine on Ray that has not taken its weights by then has failed.
    """

    kind: Literal["local", "ray"] = "local"
    address: str | None = None
    transport: Literal["copy", "file", "bytes", "ray"] | None = None
    start_timeout_s: Seconds = 300.0
    sync_timeout_s: Seconds = 120.0


@dataclass(frozen=True, config=STRICT)
class Plan:
    """The whole plan of a run. Each section is described by its own class."""

    run: RunSettings
    model: ModelSettings
    data: DataSettings
    schedule: Schedule
    lora: LoraSettings | None = None
    environment: EnvironmentSettings | None = None
    evaluation: EvaluationSettings | None = None
    sampling: Sampling = field(default_factory=Sampling)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    critic: OptimizerSettings | None = None
    conventions: Conventions = field(default_factory=Conventions)
    roles: Roles = field(default_factory=Roles)
    runtime: Runtime = field(default_factory=Runtime)

    @field_validator("sampling", mode="before")
    @classmethod
    def _spell_out(cls, given: Any) -> Any:
        try:
            return Sampling.of(given) if isinstance(given, dict) else given
        except TypeError as error:
            raise ValueError(str(error)) from error

    @field_validator("sampling")
    @classmethod
    def _require_variety(cls, sampling: Sampling) -> Sampling:
        if sampling.temperature == 0:
            raise ValueError("temperature is 0: a greedy group has one completion and nothing to learn from")
        return sampling

    @field_validator("conventions", mode="before")
    @classmethod
    def _fill_in(cls, given: Any, info: ValidationInfo) -> Any:
        """Start from the preset, at the temperature that completions are drawn at."""
        if not isinstance(given, dict):
            return given
        preset, sampling = given.pop("preset", "grpo"), info.data.get("sampling")  # None if it was refused
        if str(preset) not in PRESETS:
            raise ValueError(f"preset is {preset!r}, it has to be one of {', '.join(PRESETS)}")
        if sampling and given.setdefault("temperature", sampling.temperature) != sampling.temperature:
            raise ValueError(
                f"temperature is {given['temperature']}, but sampling.temperature is {sampling.temperature}: "
                "completions are scored at what they were drawn at; leave it out"
            )
        for name in sorted(given.keys() & SCHEDULED):
            raise ValueError(f"{name} is {given[name]!r}, but {SCHEDULED[name]}: leave it out")
        for name in sorted(given):
            if name.startswith(OF_CRITIC) and info.data.get("critic") is None:
                raise ValueError(
                    f"{name} is {given[name]!r}, which needs a critic: add the section critic, or leave it out"
                )
        return asdict(PRESETS[preset]) | given

    @field_validator("conventions")
    @classmethod
    def _require_effect(cls, conventions: Conventions) -> Conventions:
        """Refuse what this trainer would not do."""
        for each in fields(Conventions):
            value = getattr(conventions, each.name)
            if value == "custom":
                raise ValueError(f"{each.name} is 'custom', which this trainer does not have: name one that it has")
            if each.name.startswith(UNUSED) and value != each.default:
                raise ValueError(f"{each.name} is {value!r}, which this trainer does not do: leave it out")
        return conventions

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other across sections."""
        sampling, conventions, ahead = self.sampling, self.conventions, self.schedule.versions_ahead
        sampler, transport = self.roles.sampler, self.runtime.transport
        local = self.runtime.kind == "local"
        if local and transport == "ray":
            raise ValueError("runtime.transport is ray, which needs runtime.kind ray")
        if transport == "copy" and not (local and sampler.engine == "transformers"):
            raise ValueError("runtime.transport is copy, which needs runtime.kind local and a transformers engine")
        if local and sampler.replicas > 1:
            raise ValueError(f"roles.sampler.replicas is {sampler.replicas}, which needs runtime.kind ray")
        if self.environment and not self.data.chat_template:
            raise ValueError("environment is set, which needs data.chat_template: conversations are written by it")
        if self.data.order and (self.data.weights is not None or self.data.mixing != "weighted"):
            raise ValueError("data.order says which ids an epoch visits: leave out data.mixing and data.weights")
        if self.environment and self.data.answer_prefix:
            raise ValueError(
                "data.answer_prefix is set, but conversations of an environment begin no answer: leave it out"
            )
        if self.evaluation and self.evaluation.every % self.schedule.sync_every:
            raise ValueError(
                f"evaluation.every is {self.evaluation.every}, but the engines get the weights every "
                f"{self.schedule.sync_every} steps (schedule.sync_every): make it a multiple, so that the present policy is "
                "evaluated"
            )
        require_one_distribution(sampling, conventions)
        require_signal(self.schedule, conventions)
        if ahead and conventions.old_logprobs == "trainer" and conventions.importance_level == "none":
            raise ValueError(
                f"schedule.max_staleness lets sampling run {ahead} versions ahead of the trainer, but "
                "conventions.old_logprobs is trainer and importance_level none: set old_logprobs to sampler"
            )
        credit = conventions.token_credit
        if credit == "turn_returns":
            raise ValueError("conventions.token_credit is turn_returns, which needs turn ids: this trainer has none")
        if (credit == "gae") != (self.critic is not None):
            told = "needs a critic: add the section critic" if credit == "gae" else "asks no critic: set it to gae"
            raise ValueError(f"conventions.token_credit is {credit}, which {told}")
        if sampling.seed is not None or sampling.n != 1:
            raise ValueError(
                "sampling.seed and sampling.n follow from run.seed and schedule.group_size: leave them out"
            )


# Conventions that follow from another section.
SCHEDULED = {
    "epochs_per_rollout": "schedule.epochs_per_step says how often a row is trained",
    "mini_batches": "schedule.rows_per_update says how many rows an update has",
    "schedule_advances": "the learning rate changes with every update",
}


# The beginnings of the names of conventions that only a critic reads, and of those that no part of the trainer reads.
OF_CRITIC = ("critic_", "gae_", "value_")
UNUSED = (
    *("overlong_", "top_entropy", "kl_aggregation", "entropy_aggregation", "data_order", "decayed"),
    *("supervised_", "distillation_", "preference_"),
    *("logged_", "length_counts_", "unscored", "pass_threshold", "best_at_", "vote_", "overall_"),
    *("buffer_", "sync_buffers", "sync_frozen", "answer_", "prompt_style", "long_prompt", "equal_prompts"),
)
