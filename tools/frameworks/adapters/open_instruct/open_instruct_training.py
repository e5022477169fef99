"""open-instruct's updates, checkpoints and the start of its runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import open_instruct_learner as learning
import open_instruct_run as run
from open_instruct_objective import NO_PADDING, Objective

from rlcanary.adapters.stubs import absent
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import CollatedBatch
from rlcanary.contract.records.building import RunPlan, RunSettings
from rlcanary.contract.state import TrainState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rlcanary.contract.batch import Group
    from rlcanary.contract.records.building import PlanSettings
    from rlcanary.contract.records.layouts import Layout

SHARED = ("lr", "optim/grad_norm")
SHAPES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


class Training(Objective):
    """What a run does with a `TrainState`."""

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        """Run the loop that prepares data, and put its rows, which it packs, beside each other."""
        import torch

        if any(group.ref_logprobs is not None for group in groups):
            raise NotProvided("the learner computes the reference's logprobs itself")
        made = run.prepared(self.settings, groups, pad_token_id)
        ids, masks = made.rows("query_responses"), made.rows("response_masks")
        pairs = [(number, group) for number, group in enumerate(groups) for _ in group.completions]
        starts_B = torch.tensor([len(group.prompt_ids) for _, group in pairs])

        def padded(rows: Sequence[Tensor], value: float, whole: bool = False) -> Any:
            cut = rows if whole else [row[start:] for row, start in zip(rows, starts_B.tolist(), strict=True)]
            return torch.nn.utils.rnn.pad_sequence(list(cut), batch_first=True, padding_value=value)

        return CollatedBatch(
            input_ids=padded(ids, pad_token_id, whole=True),
            attention_mask=padded([torch.ones(len(row)).bool() for row in ids], False, whole=True),
            position_ids=padded(made.rows("position_ids"), 0, whole=True),
            completion_starts=starts_B,
            completion_ids=padded(ids, pad_token_id),
            completion_mask=padded(masks, False),
            rewards=torch.tensor([float(reward) for group in groups for reward in group.rewards]),
            group_ids=torch.tensor([number for number, _ in pairs]),
            old_logprobs=padded(made.rows("vllm_logprobs"), torch.nan),
            item_ids=[group.item_id for _, group in pairs],
        )

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        """Treat the models as the learner does when it has loaded them."""
        from open_instruct.model_utils import disable_dropout_in_model

        disable_dropout_in_model(model)
        model.train()
        if ref_model is not None:
            disable_dropout_in_model(ref_model)
            ref_model.eval()
        return super().new_state(model, ref_model, learning_rate)

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        if batch.old_logprobs is None:
            raise NotProvided("the engine gives the logprobs of all that it samples")
        if self.conventions.kl_coef and batch.ref_logprobs is not None:
            raise NotProvided("the learner computes the reference's logprobs itself")
        return self._trained(state, batch.groups(), NO_PADDING, {"num_mini_batches": 1, "num_epochs": 1})

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        return self._trained(state, groups, pad_token_id, {})

    def _trained(
        self, state: Any, groups: list[Group], pad_token_id: int, settings: dict[str, Any]
    ) -> dict[str, float]:
        """Prepare the groups, and run the learner's step on them."""
        if self.conventions.kl_coef and state.ref_model is None:
            raise NotProvided("beta needs a reference")
        configs = self.configs(**settings)
        configs.args.world_size = 1
        data = run.prepared({**self.settings, **settings}, groups, pad_token_id)
        with run.on_cpu(), run.as_loaded(state.model, state.ref_model):
            made = self._learner(state, configs, pad_token_id)
            logged = learning.step(made, data.collated[0], data.metrics)
        return self._named(logged)

    def _named(self, logged: dict[str, float]) -> dict[str, float]:
        return {
            **self.renamed(logged),
            "loss": logged["loss/total_avg"],
            "grad_norm": logged["optim/grad_norm"],
            "lr": logged["lr"],
            "reward": logged["scores"],
        }

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        """Run the step of the learners of all data-parallel ranks, whose micro-batches are their packed sequences."""
        import torch

        ranks = layout.data_parallel
        if max(layout.context_parallel, layout.tensor_parallel, layout.pipeline_parallel, layout.expert_parallel) > 1:
            raise NotProvided("this adapter has data-parallel ranks alone")
        if batch.old_logprobs is None:
            raise NotProvided("the engine gives the logprobs of all that it samples")
        if self.conventions.kl_coef and (batch.ref_logprobs is not None or state.ref_model is None):
            raise NotProvided("the learner computes the reference's logprobs itself")
        settings = {**self.settings, "num_mini_batches": 1, "num_epochs": 1}
        configs = run.configs_of(settings)
        configs.args.world_size = ranks
        data = run.prepared(settings, batch.groups(), NO_PADDING, ranks)
        logged = []
        state.optimizer.zero_grad()
        with run.on_cpu(), run.as_loaded(state.model, state.ref_model):
            counts = learning.over_ranks(data.collated)
            with patch.object(torch.distributed, "all_reduce", lambda tensor, **_: tensor.copy_(counts)):
                for rank, own in enumerate(data.collated):
                    made = self._learner(state, configs, ranks=ranks, is_last=rank == ranks - 1)
                    logged.append(learning.step(made, own, data.metrics))
            # Each rank has the same schedule and the same norm, which here the last one knows.
            metrics = learning.logged_of([{**one, **{name: logged[-1][name] for name in SHARED}} for one in logged])
        return self._named(metrics)

    def _learner(
        self, state: Any, configs: run.Configs, pad_token_id: int = NO_PADDING, ranks: int = 1, is_last: bool = True
    ) -> Any:
        kind = learning.Engine if is_last else learning.Waiting
        clip = configs.args.max_grad_norm or 0.0
        engine = kind(state.model, state.optimizer, state.scheduler, clip, ranks)
        scheduler = state.scheduler or learning.Constant(state.optimizer)
        return learning.learner(configs, engine, state.ref_model, pad_token_id, scheduler)

    # Checkpoints

    def save_checkpoint(self, state: Any, folder: Path) -> None:
        done = len(list(folder.glob("global_step*"))) + 1
        with run.on_cpu():
            made = self._learner(state, self._with_reference(state))
            made.save_checkpoint_state(str(folder), {"training_step": done})

    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        """Run `from_pretrained` of the learner, which loads a checkpoint behind the model."""
        configs = self._with_reference(state)
        configs.args.checkpoint_state_dir = str(folder)
        with started(state.model, state.ref_model, given=state):
            made = _from_pretrained(configs)
        return replace_state(state, made)

    def _with_reference(self, state: Any) -> run.Configs:
        has_reference = state.ref_model is not None
        changes = {} if has_reference else {"beta": 0.0}
        return self.configs(load_ref_policy=has_reference, num_training_steps=1, world_size=1, **changes)

    # The start of a run

    def build(self, settings: RunSettings, model: Any) -> Any:
        import copy

        plain = RunSettings()
        if (settings.betas, settings.eps) != (plain.betas, plain.eps) or settings.final_share:
            raise NotProvided("open-instruct has no option for AdamW's betas and eps, or for the end of a schedule")
        if settings.frozen or settings.lora is not None:
            raise NotProvided("grpo_fast trains all parameters")
        configs = self.configs(
            learning_rate=settings.learning_rate,
            warmup_ratio=settings.warmup_updates / settings.total_updates,
            lr_scheduler_type=SHAPES[settings.rate_shape],
            weight_decay=settings.weight_decay,
            num_training_steps=settings.total_updates,
            world_size=1,
            num_epochs=1,
            num_mini_batches=1,
        )
        reference = copy.deepcopy(model) if configs.args.load_ref_policy else None
        with started(model, reference):
            made = _from_pretrained(configs)
        return TrainState(made.model.module, made.optimizer, made.scheduler, getattr(made, "ref_policy", None))

    def run_plan(self, settings: PlanSettings) -> RunPlan:
        """Run the set-up of a run and the batches that its actor asks for."""
        from open_instruct import grpo_fast

        steps = settings.n_items // settings.prompts_per_batch * settings.epochs
        if not settings.drop_last or settings.ranks > 1:
            raise NotProvided("one actor serves all ranks, and goes on into the next epoch")
        steps = steps if settings.max_batches is None else min(steps, settings.max_batches)
        if not steps or settings.n_items % settings.prompts_per_batch:
            raise NotProvided("a run has a number of episodes, and its batches go on into the next epoch")
        configs = self.configs(
            num_unique_prompts_rollout=settings.prompts_per_batch,
            total_episodes=steps * settings.prompts_per_batch * self.configs().streaming.num_samples_per_prompt_rollout,
            push_to_hub=False,
        )
        with run.on_cpu(), tempfile.TemporaryDirectory() as folder:
            args = grpo_fast.setup_runtime_variables(configs.args, configs.streaming, SimpleNamespace(enabled=False))
            dataset = run.dataset_of([[1]] * settings.n_items)
            actor = run.preparation_actor(configs, dataset, 0, 1, settings.prompts_per_batch, folder=folder)
            batches = [
                [int(next(actor.iter_dataloader)["index"]) for _ in range(settings.prompts_per_batch)]
                for _ in range(args.num_training_steps)
            ]
        updates = args.num_training_steps * args.num_epochs * args.num_mini_batches
        return RunPlan([batches], updates, self._schedule_updates(args))

    def _schedule_updates(self, args: Any) -> int:
        """Read off `from_pretrained` how long the schedule is."""
        import torch

        lengths: list[int] = []

        def noted(*_: Any, num_training_steps: int, **__: Any) -> Any:
            lengths.append(num_training_steps)

        from open_instruct import grpo_fast

        configs = self.configs(load_ref_policy=False, beta=0.0)
        configs.args.num_training_steps = args.num_training_steps
        model = torch.nn.Linear(1, 1)
        model.config = SimpleNamespace(use_cache=False)  # type: ignore[assignment]
        model.gradient_checkpointing_enable = lambda: None  # type: ignore[assignment]
        with started(model, None), patch.object(grpo_fast, "get_scheduler", noted):
            _from_pretrained(configs)
        return lengths[0]


def replace_state(state: Any, made: Any) -> Any:
    """Return the state with what a learner has loaded."""
    reference = getattr(made, "ref_policy", None)
    return replace(
        state, model=made.model.module, optimizer=made.optimizer, scheduler=made.scheduler, ref_model=reference
    )


class OnCpu(str):
    """The number of the learner's GPU, which is 0 where it is added to the seed, and the CPU where it is a device."""

    def __radd__(self, seed: int) -> int:
        return seed


def _from_pretrained(configs: run.Configs) -> Any:
    """Run the learner's `from_pretrained`."""
    from open_instruct.model_utils import ModelConfig

    configs.args.world_size = 1
    made = learning.learner(configs, None, None, NO_PADDING, None)
    made.world_size = made.dp_world_size = 1
    made.local_rank = OnCpu("cpu")
    made.from_pretrained(configs.args, ModelConfig("model"), None, "", SimpleNamespace(pad_token_id=NO_PADDING))
    return made


@contextmanager
def started(model: Any, ref_model: Any, given: Any = None) -> Iterator[None]:
    """Let the learner start in this process with these models, and with the optimizer and schedule of a given state."""
    import torch
    from open_instruct import data_loader, grpo_fast, model_utils

    loaded = iter([model, ref_model])
    references: list[Any] = []

    def initialized(model: Any, optimizer: Any = None, lr_scheduler: Any = None, config: Any = None, **_: Any) -> Any:
        if optimizer is None:
            references.append(model)
            return (model,)
        if any(each.dtype != torch.float32 for each in model.parameters()):
            raise NotProvided("DeepSpeed's engine keeps float32 masters of such weights")
        clip = config["gradient_clipping"]
        if given is not None:
            optimizer, lr_scheduler = given.optimizer, given.scheduler
        engine = learning.Engine(model, optimizer, lr_scheduler, clip)
        return engine, optimizer, None, lr_scheduler

    deepspeed = SimpleNamespace(initialize=initialized, init_distributed=lambda **_: None)
    with ExitStack() as stack:
        for place, name, value in (
            (grpo_fast, "deepspeed", deepspeed),
            (model_utils, "deepspeed", deepspeed),
            (grpo_fast.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: next(loaded)),
            (grpo_fast.UlyssesSPAttentionHF, "register_with_transformers", lambda **_: None),
            (grpo_fast.utils, "MetricsTracker", lambda **_: None),
            (data_loader.StreamingDataLoaderConfig, "build_dataloader", lambda *_, **__: []),
            (torch.cuda, "set_device", lambda _: None),
            (torch.distributed, "is_initialized", lambda: True),
        ):
            stack.enter_context(patch.object(place, name, value))
        stack.enter_context(absent("deepspeed"))
        stack.enter_context(run.on_cpu())
        stack.enter_context(torch.random.fork_rng())
        yield
