"""Read the plan of a run from YAML; refuse it before anything starts, naming the wrong key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlcanary.contract.conventions import PRESETS, Conventions
from rlcanary.contract.sampling import Sampling
from rlcanary.errors import UserError
from rlcanary.grpo.plan.models import ModelSettings
from rlcanary.grpo.plan.optimizer import OptimizerSettings
from rlcanary.grpo.plan.schedule import Schedule
from rlcanary.grpo.plan.sections import read_section


@dataclass(frozen=True)
class RunSettings:
    """The folder and length of a run.

    Attributes:
        folder: folder of its log, trace and checkpoints; relative to the current folder.
        steps: rollouts, each with its updates.
        seed: seed of weights, data order and sampling.
        threads: threads of torch in the trainer's process.
        checkpoint_every: steps between two checkpoints; 0 writes none.
        keep_checkpoints: number of latest checkpoints that stay.
        tensorboard: also write TensorBoard event files.
    """

    folder: Path
    steps: int
    seed: int = 0
    threads: int = 1
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name, least in {"steps": 1, "threads": 1, "checkpoint_every": 0, "keep_checkpoints": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, it has to be at least {least}")


@dataclass(frozen=True)
class DataSettings:
    """The training data.

    Attributes:
        datasets: each has a `name`, "arithmetic", "strings" or a path that ends in .jsonl, and that dataset's options.
        mixing: "weighted" draws each next prompt from a dataset by weight, "sequence" takes one after the other.
        weights: by name of dataset; None weighs all alike.
        system_prompt: stands before every conversation that has none of its own.
        chat_template: render prompts with the tokenizer's template; false encodes their bare text.
    """

    datasets: tuple[Mapping[str, Any], ...]
    mixing: Literal["weighted", "sequence"] = "weighted"
    weights: Mapping[str, Any] | None = None
    system_prompt: str = ""
    chat_template: bool = True

    def __post_init__(self) -> None:
        _check_datasets(self.datasets)


def _check_datasets(datasets: Sequence[Mapping[str, Any]]) -> None:
    if not datasets:
        raise ValueError("datasets is empty")
    for index, dataset in enumerate(datasets):
        if not isinstance(dataset.get("name"), str):
            raise ValueError(f"datasets[{index}].name is missing")


@dataclass(frozen=True)
class EvaluationSettings:
    """Evaluation as the policy trains, once per prompt, at the temperature of `conventions.evaluation_temperature`.

    Attributes:
        datasets: held-out datasets, as `data.datasets` lists those to train on; prompts are written alike.
        every: steps between two evaluations; the first one is before the first update.
    """

    datasets: tuple[Mapping[str, Any], ...]
    every: int = 10

    def __post_init__(self) -> None:
        _check_datasets(self.datasets)
        if self.every < 1:
            raise ValueError(f"every is {self.every}, it has to be at least 1")


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class SamplerRole:
    """The engines that sample.

    Attributes:
        engine: "in_process" samples in a copy of the model with transformers, "vllm" in vLLM.
        replicas: engines beside each other; more than one needs the runtime "ray".
        cpus: CPUs that Ray sets aside for each.
        slots: requests that a replica takes at once.
        request_timeout_s: a request that takes longer has failed and is tried again; None waits for ever.
        options: passed to vLLM's engine as they are.
    """

    engine: Literal["in_process", "vllm"] = "in_process"
    replicas: int = 1
    cpus: float = 1.0
    slots: int = 64
    request_timeout_s: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.slots < 1 or self.cpus < 0:
            raise ValueError(
                f"replicas is {self.replicas}, slots {self.slots} (at least 1 each) and cpus {self.cpus} (at least 0)"
            )


@dataclass(frozen=True)
class VerifierRole:
    """The verifiers that judge completions; each row of a dataset names its verifier.

    Attributes:
        workers: processes per verifier, on Ray; 0 judges in the trainer's process, where nothing ends a call that hangs.
        timeout_s: limit of one judgement by a worker. A timeout is not a reward of zero: its group is sampled again.
        options: arguments of verifiers, by name.
    """

    workers: int = 0
    timeout_s: float = 10.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.workers < 0 or not self.timeout_s > 0:
            raise ValueError(f"workers is {self.workers} (at least 0) and timeout_s {self.timeout_s} (above 0)")


@dataclass(frozen=True)
class Roles:
    """The roles of a run."""

    sampler: SamplerRole = field(default_factory=SamplerRole)
    verifier: VerifierRole = field(default_factory=VerifierRole)


@dataclass(frozen=True)
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
    transport: Literal["copy", "file", "bytes", "ray", "gloo", "nccl"] | None = None
    start_timeout_s: float = 300.0
    sync_timeout_s: float = 120.0


@dataclass(frozen=True)
class Plan:
    """The whole plan of a run. Each section is described by its own class."""

    run: RunSettings
    model: ModelSettings
    data: DataSettings
    schedule: Schedule
    environment: EnvironmentSettings | None = None
    evaluation: EvaluationSettings | None = None
    sampling: Sampling = field(default_factory=Sampling)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    conventions: Conventions = field(default_factory=Conventions)
    roles: Roles = field(default_factory=Roles)
    runtime: Runtime = field(default_factory=Runtime)

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other across sections.

        Raises:
            UserError: naming the keys.
        """
        local = self.runtime.kind == "local"
        if local and self.runtime.transport == "ray":
            raise UserError("runtime.transport is ray, which needs runtime.kind ray")
        if self.runtime.transport == "copy" and (not local or self.roles.sampler.engine != "in_process"):
            raise UserError(
                "runtime.transport is copy, which reaches an in_process engine in the trainer's own process only"
            )
        if local and self.roles.sampler.replicas > 1:
            raise UserError(
                f"roles.sampler.replicas is {self.roles.sampler.replicas}, which needs runtime.kind ray: one process has one"
            )
        if local and self.roles.verifier.workers:
            raise UserError(f"roles.verifier.workers is {self.roles.verifier.workers}, which needs runtime.kind ray")
        if self.environment and not self.data.chat_template:
            raise UserError("environment is set, which needs data.chat_template: conversations are written by it")
        if self.sampling.temperature == 0:
            raise UserError("sampling.temperature is 0: a greedy group has one completion and nothing to learn from")
        if self.sampling.logprobs is None and self.conventions.old_logprobs == "sampler":
            raise UserError("sampling.logprobs is empty, but conventions.old_logprobs takes the ratio against them")
        is_uncorrected = self.conventions.old_logprobs == "trainer" and self.conventions.importance_level == "none"
        if self.schedule.versions_ahead and is_uncorrected:
            raise UserError(
                f"schedule.max_staleness lets sampling run {self.schedule.versions_ahead} versions ahead of the trainer, "
                "but conventions.old_logprobs is trainer and importance_level none, which takes all rows for the "
                "trainer's own: set old_logprobs to sampler"
            )
        if self.sampling.seed is not None or self.sampling.n != 1:
            raise UserError(
                "sampling.seed and sampling.n are not set here: they follow from run.seed and schedule.group_size"
            )


def read_plan(path: Path, overrides: Sequence[str] = ()) -> Plan:
    """Read the plan in a YAML file.

    Args:
        path: path of the file.
        overrides: assignments such as "roles.sampler.engine=vllm", each with a value in YAML.

    Raises:
        UserError: the file cannot be read, is not YAML, or holds settings that a plan refuses; nothing has started then.
    """
    try:
        import yaml
    except ImportError as error:
        raise UserError(f"a plan needs PyYAML ({error}); pip install 'rlcanary[grpo]'") from error
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
        for override in overrides:
            _override(given, override, yaml.safe_load)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the plan {path}: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    try:
        return plan_of(given)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def plan_of(given: Any) -> Plan:
    """Read the plan from nested mappings. Conventions and sampling have keys of their own, see there.

    Raises:
        UserError: naming the key that is wrong.
    """
    if not isinstance(given, Mapping):
        raise UserError("the plan is empty, it has to be a mapping of sections")
    try:
        sampling = Sampling.of(_mapping(given, "sampling"))
    except (ValueError, TypeError) as error:
        raise UserError(f"sampling: {error}") from error
    conventions = _conventions(_mapping(given, "conventions"), sampling.temperature)
    return read_section(Plan, {**given, "sampling": sampling, "conventions": conventions}, "")


def _conventions(given: Mapping[str, Any], temperature: float) -> Conventions:
    changes = dict(given)
    preset = changes.pop("preset", "grpo")
    if preset not in PRESETS:
        raise UserError(f"conventions.preset is {preset!r}, it has to be one of {', '.join(PRESETS)}")
    if changes.setdefault("temperature", temperature) != temperature:
        raise UserError(
            f"conventions.temperature is {changes['temperature']}, but sampling.temperature is {temperature}: completions "
            "are scored at what they were drawn at; leave it out"
        )
    try:
        return PRESETS[preset].replace(**changes)
    except (TypeError, ValueError) as error:
        raise UserError(f"conventions: {error}") from error


def _mapping(given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = given.get(key, {})
    if not isinstance(section, Mapping):
        raise UserError(f"{key} is {section!r}, it has to be a mapping of keys to values")
    return section


def _override(given: Any, override: str, parse: Callable[[str], Any]) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"{override!r} is not key=value, such as roles.sampler.engine=vllm")
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(given, dict):
            break
        given = given.setdefault(parent, {})
    if not isinstance(given, dict):
        raise UserError(f"{key} cannot be set: what stands above it is not a mapping")
    given[last] = parse(value)
