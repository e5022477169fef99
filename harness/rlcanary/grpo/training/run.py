"""Open a run before its first step, and close it after its last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from rlcanary.contract.engine import Engine
from rlcanary.contract.sampling import Sampling
from rlcanary.errors import UserError
from rlcanary.grpo.data.data import evaluation_iterator, item_iterator
from rlcanary.grpo.data.items import ItemIterator
from rlcanary.grpo.engines.engine_pool import EnginePool
from rlcanary.grpo.engines.policy import eos_ids
from rlcanary.grpo.engines.samplers import Samplers, start_samplers
from rlcanary.grpo.lora import add_adapters, target_layers
from rlcanary.grpo.plan.learnable import require_room
from rlcanary.grpo.plan.models import load_model, pad_id
from rlcanary.grpo.plan.plan import Plan, SamplerRole, VerifierRole
from rlcanary.grpo.plan.schedule import Schedule
from rlcanary.grpo.rewards.by_name import VerifiersByName
from rlcanary.grpo.rewards.workers import ChildWorker, RayWorker
from rlcanary.grpo.rollout.buffer import GroupBuffer, RemoteBuffer, start_buffer
from rlcanary.grpo.rollout.collector import Collector, seeded
from rlcanary.grpo.rollout.conversations import ConversationCollector
from rlcanary.grpo.rollout.environment import ChatEnvironment
from rlcanary.grpo.rollout.open_environment import chat_environment
from rlcanary.grpo.sync.sync import Endpoint, sync_weights
from rlcanary.grpo.training.checkpoint import (
    last_checkpoint,
    learner_content,
    load_checkpoint,
    random_state,
    restore_learner,
    restore_random_state,
    save_checkpoint,
)
from rlcanary.grpo.training.critic import new_critic
from rlcanary.grpo.training.rollout import Rollout
from rlcanary.grpo.training.run_log import LOG, RunLog
from rlcanary.grpo.training.trace import Trace
from rlcanary.grpo.training.trainer import LearnerState, new_state, refresh_reference
from rlcanary.grpo.training.updates import Audit

Result = TypeVar("Result")
Data = tuple[ItemIterator[Any], ChatEnvironment | None]
CHECKPOINTS, TRACE = "checkpoints", "trace.ndjson"


@dataclass
class Run:
    """A run: everything that the training loop uses.

    Attributes:
        step: the next one.
        collector: samples the items of the plan's datasets with `samplers`.
        verifiers: score the completions.
        rollout: brings groups to the trainer.
        evaluation: samples the plan's held-out items; None if it has none.
        pad_token_id: fills the padding of batches.
        thread: the trainer's own.
        audit: looks at the updates; None for none.
        synced: the model as the engines have it; None where a sync follows every step, so that it is the present one.
    """

    plan: Plan
    step: int
    state: LearnerState
    samplers: Samplers
    collector: Collector
    verifiers: VerifiersByName
    rollout: Rollout
    evaluation: Collector | None
    log: RunLog
    trace: Trace
    pad_token_id: int
    thread: ThreadPoolExecutor
    audit: Audit | None = None
    synced: dict[str, Any] | None = None

    @property
    def live_endpoints(self) -> list[Endpoint]:
        """Return the endpoints of the engines that are still in use.

        Raises:
            EnginesLost: there is none.
        """
        self.collector.pool.require_alive()
        return [self.samplers.endpoints[replica] for replica in self.collector.pool.alive]

    async def compute(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in the trainer's own thread, while the event loop serves samplers and verifiers."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *arguments)

    def note_sync(self) -> None:
        """Keep the model that the engines now have, for checkpoints before the next sync."""
        if self.plan.schedule.sync_every > 1:
            self.synced = {name: each.to("cpu", copy=True) for name, each in self.state.model.state_dict().items()}

    async def save(self) -> None:
        """Write a checkpoint of everything that the next step depends on. Groups in the buffer will be sampled again.

        Raises:
            CheckpointError: it was not written.
        """
        content = {
            "step": self.step,
            "plan": _settings(self.plan),
            **learner_content(self.state),
            "synced": None if self.plan.schedule.synced_before(self.step) else self.synced,
            "random": random_state(),
            "groups": await self.rollout.buffer.state(),
            "data": self.collector.items.state(),
            "version": self.samplers.version,
            "audit": None if self.audit is None else self.audit.state_dict(),
        }
        save_checkpoint(self.plan.run.folder / CHECKPOINTS, self.step, content, self.plan.run.keep_checkpoints)

    def restore(self, content: dict[str, Any]) -> None:
        """Resume from a checkpoint, the samplers with the weights and the version that they had.

        Raises:
            SyncError: the samplers did not take the weights.
        """
        self.collector.items.load_state(content["data"])
        self.state.model.load_state_dict(content.get("synced") or content["model"])
        sync_weights(self.state.model, self.samplers.endpoints, self.samplers.transport)
        self.note_sync()
        restore_learner(self.state, content)
        for endpoint in self.samplers.endpoints:
            endpoint.version = content["version"]
        restore_random_state(content["random"])
        if self.audit is not None and content.get("audit") is not None:
            self.audit.load_state_dict(content["audit"])
        self.log.drop_from(content["step"])
        self.step = content["step"]


@contextmanager
def open_run(plan: Plan, resume: bool = False, audit: Audit | None = None) -> Iterator[Run]:
    """Check all that a plan names, then start it. Nothing is left running afterwards, whatever happened.

    Args:
        plan: the run's plan.
        resume: resume from the last checkpoint in its folder.
        audit: looks at the updates; None for none.

    Raises:
        UserError: the plan names something that is not there, the folder holds a run that is not to be resumed, or no
            checkpoint of this plan to resume from. Nothing was started then, and the folder is as it was.
    """
    import torch

    folder = plan.run.folder
    checkpoint = _checkpoint(plan, resume)
    model, tokenizer = check_plan(plan)
    pad_token_id = pad_id(tokenizer)
    torch.set_num_threads(plan.run.threads)
    torch.manual_seed(plan.run.seed)
    folder.mkdir(parents=True, exist_ok=True)
    is_remote = plan.runtime.kind == "ray"
    with ExitStack() as stack:
        log = RunLog(folder, checkpoint["step"] if checkpoint else 0, plan.run.tensorboard)
        stack.callback(log.close)
        if is_remote:
            from rlcanary.grpo.engines.ray_actors import connected

            stack.enter_context(connected(plan.roles.sampler, plan.runtime))
        verifiers = _verifiers(plan.roles.verifier, plan.roles.verifier.workers, is_remote)
        stack.callback(verifiers.close)
        data, *held_out = _data(plan, tokenizer, verifiers)
        role = plan.roles.sampler
        sampling = replace(plan.sampling, seed=plan.run.seed).with_ends(
            eos_ids(model.generation_config.eos_token_id, tokenizer)
        )
        samplers = stack.enter_context(start_samplers(role, plan.runtime, sampling, folder, model, tokenizer))
        state = _learner(plan, model)  # behind the samplers, which read the model without adapters
        grouped = replace(sampling, n=plan.schedule.group_size)
        collector = _collector(role, samplers.engines, data, grouped)
        own = seeded({"seed": plan.run.seed}, "evaluation")["seed"]
        alone = replace(sampling, temperature=plan.conventions.evaluation_temperature, seed=own)
        evaluation = _collector(role, collector.pool, held_out[0], alone) if held_out else None
        buffer = stack.enter_context(_buffer(plan.schedule, is_remote, checkpoint and checkpoint["groups"]))
        rollout = Rollout(collector, buffer, plan.schedule, log)
        thread = stack.enter_context(ThreadPoolExecutor(1, "trainer"))
        trace = Trace(folder / TRACE)
        run = Run(plan, 0, state, samplers, collector, verifiers, rollout, evaluation, log, trace, pad_token_id, thread)
        run.audit = audit
        run.note_sync()
        if checkpoint:
            run.restore(checkpoint)
        yield run


def _learner(plan: Plan, model: Any) -> LearnerState:
    """Make the state that trains a loaded model."""
    model.to(_device(plan))
    critic = None if plan.critic is None else new_critic(model, plan.critic)
    if plan.lora is not None:
        add_adapters(model, plan.lora, plan.run.seed)
    state = new_state(model, plan.optimizer)
    state.critic = critic
    if plan.conventions.kl_coef != 0:
        refresh_reference(state)
    return state


@contextmanager
def _buffer(schedule: Schedule, is_remote: bool, state: dict[str, Any] | None) -> Iterator[GroupBuffer | RemoteBuffer]:
    """Open the buffer between samplers and trainer.

    It lives in this process, or in an actor if groups are sampled ahead on Ray.
    """
    settings = (max(schedule.prompts_per_step, schedule.prompts_ahead), schedule.versions_ahead, state)
    if not is_remote or not schedule.versions_ahead:
        yield GroupBuffer(*settings)
        return
    import ray

    actor = start_buffer(*settings)
    try:
        yield RemoteBuffer(actor)
    finally:
        ray.kill(actor)


def check_plan(plan: Plan) -> tuple[Any, Any]:
    """Load all that a plan names -> the model and its tokenizer.

    Raises:
        UserError: something is not there or does not fit, named by its key.
    """
    _device(plan)
    verifiers = _verifiers(plan.roles.verifier, workers=0)
    model, tokenizer = load_model(plan.model, plan.run.seed)
    if plan.lora is not None:
        target_layers(model, plan.lora)
    pad_id(tokenizer)
    for items, environment in _data(plan, tokenizer, verifiers):
        for item in items.items.values():
            prompt_ids = environment.prompt_ids(environment.reset(item)) if environment else item.prompt_ids
            try:
                require_room(len(prompt_ids), item.id, plan.schedule)
            except ValueError as error:
                raise UserError(str(error)) from error
    return model, tokenizer


def _device(plan: Plan) -> str:
    import torch

    sees_gpu = torch.cuda.is_available()
    if plan.run.device == "auto":
        return "cuda" if sees_gpu else "cpu"
    if plan.run.device == "cuda" and not sees_gpu:
        raise UserError("run.device is cuda, but torch sees no GPU: set it to cpu, or to auto for either")
    return plan.run.device


def _data(plan: Plan, tokenizer: Any, verifiers: VerifiersByName) -> list[Data]:
    """Open the items to train on, and those that are held out if the plan has some, with their environments."""
    environment, as_rows = plan.environment, plan.environment is not None
    ahead = plan.schedule.prompts_ahead or None
    opened = [item_iterator(plan.data, tokenizer, verifiers, seed=plan.run.seed, as_rows=as_rows, most_in_flight=ahead)]
    if plan.evaluation:
        opened.append(evaluation_iterator(plan.evaluation, plan.data, tokenizer, verifiers, as_rows=as_rows))
    if environment is None:
        return [(items, None) for items in opened]
    prompt = plan.data.system_prompt
    return [(items, chat_environment(environment, items, tokenizer, verifiers, prompt)) for items in opened]


def _collector(role: SamplerRole, engines: Sequence[Engine] | EnginePool, data: Data, sampling: Sampling) -> Collector:
    items, environment = data
    settings: dict[str, Any] = {"slots": role.slots, "request_timeout_s": role.request_timeout_s}
    if environment is None:
        return Collector(engines, items, asdict(sampling), one_by_one=role.requests == "completion", **settings)
    return ConversationCollector(environment, engines, items, asdict(sampling), **settings)


def _verifiers(role: VerifierRole, workers: int | None, is_remote: bool = False) -> VerifiersByName:
    make_worker = RayWorker if is_remote else ChildWorker
    try:
        return VerifiersByName(role.options, workers=workers, timeout_s=role.timeout_s, make_worker=make_worker)
    except UserError as error:
        raise UserError(f"roles.verifier.options: {error}") from error


def _checkpoint(plan: Plan, resume: bool) -> dict[str, Any] | None:
    folder = plan.run.folder
    path = last_checkpoint(folder / CHECKPOINTS)
    if resume and path is None:
        raise UserError(f"run.folder {folder} has no checkpoint to resume from")
    if not resume and (path is not None or (folder / LOG).exists()):
        raise UserError(f"run.folder {folder} holds a run already: continue it (--resume), or choose another folder")
    if path is None:
        return None
    content = load_checkpoint(path)
    differing = sorted(key for key, value in _settings(plan).items() if content["plan"].get(key) != value)
    if differing:
        raise UserError(f"the checkpoint is of a plan with other {', '.join(differing)}: choose another run.folder")
    if content["step"] > plan.run.steps:
        raise UserError(
            f"the run is at step {content['step']}, beyond run.steps {plan.run.steps}: resume with --set run.steps=N"
        )
    return content


def _settings(plan: Plan) -> dict[str, Any]:
    """Return the settings that must not change when a run resumes; it may be longer, and its engines may be others."""
    free = ("run", "evaluation", "roles", "runtime")
    kept = {name: repr(value) for name, value in asdict(plan).items() if name not in free}
    return {**kept, "run.seed": repr(plan.run.seed)}
