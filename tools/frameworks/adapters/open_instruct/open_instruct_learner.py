"""open-instruct's learner, `PolicyTrainerRayProcess`, in this process: its own step on a stand-in of DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import open_instruct_run as run

if TYPE_CHECKING:
    from torch import Tensor

MODEL, CLIENT = "model_states.pt", "client_state"


class Engine:
    """A model and its optimizer behind the interface of DeepSpeed's engine, on one rank and without half precision.

    Attributes:
        loss: the sum of the losses that went backward.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, scheduler: Any = None, clip: float = 0.0, ranks: int = 1
    ) -> None:
        self.module, self.optimizer, self.scheduler, self.clip = model, optimizer, scheduler, clip
        self.mpu: Any = None
        self._ranks = ranks
        self.loss, self._norm, self._ends = 0.0, 0.0, True
        if optimizer is not None and ranks == 1:
            optimizer.zero_grad()

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def parameters(self) -> Any:
        return self.module.parameters()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._ends = is_boundary

    def backward(self, loss: Tensor) -> None:
        self.loss += float(loss.detach())
        loss.backward()

    def step(self) -> None:
        """Clip, update, and forget the gradients, as the engine does at the end of an accumulation."""
        import torch

        if not self._ends or self.optimizer is None:
            return
        trained = [each for group in self.optimizer.param_groups for each in group["params"]]
        for each in trained:
            if each.grad is not None:
                each.grad /= self._ranks
        self._norm = float(torch.nn.utils.clip_grad_norm_(trained, self.clip or float("inf")))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def get_global_grad_norm(self) -> float:
        return self._norm

    def save_checkpoint(self, folder: str, client_state: Mapping[str, Any]) -> None:
        """Write what DeepSpeed's engine writes of one rank, into a folder named for the step, and its name into `latest`."""
        import torch

        tag = f"global_step{client_state['training_step']}"
        Path(folder, tag).mkdir(parents=True, exist_ok=True)
        state = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        state["lr_scheduler"] = None if self.scheduler is None else self.scheduler.state_dict()
        torch.save({**state, CLIENT: dict(client_state)}, Path(folder, tag, MODEL))
        Path(folder, "latest").write_text(tag)

    def load_checkpoint(self, folder: str, **_: Any) -> tuple[str | None, Any]:
        """Load what `latest` names."""
        import torch

        latest = Path(folder, "latest")
        if not latest.exists():
            return None, None
        state = torch.load(Path(folder, latest.read_text(), MODEL), weights_only=False)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["lr_scheduler"])
        return str(folder), state[CLIENT]


class Waiting(Engine):
    """The engine of a rank whose gradients another rank, which has the same weights, adds to its own."""

    def step(self) -> None:
        """Do nothing: the last rank updates the weights."""


class Constant:
    """The scheduler of a state that has none."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


def learner(configs: run.Configs, model: Any, ref_model: Any, pad_token_id: int, scheduler: Any) -> Any:
    """Make the learner of rank 0 with what its step reads.

    Args:
        configs: the configuration of the run, whose `args.world_size` is the number of ranks.
        model: the policy as an `Engine`.
        ref_model: the reference; None where `load_ref_policy` is off.
        pad_token_id: the tokenizer's padding id.
        scheduler: what tells the learning rate.
    """
    import torch
    from open_instruct import grpo_fast, utils

    owner = grpo_fast.PolicyTrainerRayProcess.__ray_metadata__.modified_class
    made = owner.__new__(owner)
    made.args, made.streaming_config, made.vllm_config = configs.args, configs.streaming, configs.vllm
    made.rank, made.local_rank, made.device = 0, 0, torch.device("cpu")
    made.num_mini_batches, made.pad_token_id = configs.args.num_mini_batches, pad_token_id
    made.model, made.ref_policy, made.scheduler = model, ref_model, scheduler
    made.splitter = made.mpu = None
    made.local_metrics = utils.MetricsTracker(max_metrics=512, device="cpu")
    return made


def step(made: Any, batch: Any, metrics: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Run the learner's step on the micro-batches of its rank -> what it logs."""
    import torch

    made.dataloader = iter([{"batch": batch, "metrics": dict(metrics or {})}])
    with torch.enable_grad():
        logged, _ = made.step()
    return {name: float(value) for name, value in logged.items()}


def over_ranks(batches: Sequence[Any]) -> Tensor:
    """Return the tokens of each micro-batch over all ranks: what `all_reduce` leaves in the counts of every rank."""
    import torch
    from open_instruct import grpo_utils

    counts: list[Tensor] = []

    def note(tensor: Tensor, **_: Any) -> None:
        counts.append(tensor.clone())

    with patch.object(torch.distributed, "all_reduce", note):
        for batch in batches:
            grpo_utils.calculate_token_counts(1, batch, torch.device("cpu"))
    return torch.stack(counts).sum(dim=0)


def logged_of(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Reduce what the learners of all ranks logged, as the main process does in `one_training_step`."""
    from types import SimpleNamespace

    from open_instruct import grpo_fast

    logged: dict[str, Any] = {}
    times = {"time/group_generation_max": 1.0}
    lengths: dict[str, list[int]] = {"batch/prompt_lengths": [], "batch/response_lengths": []}
    learners = [SimpleNamespace(step=SimpleNamespace(remote=lambda one=one: one)) for one in of_ranks]
    manager = SimpleNamespace(report_training_step_time=SimpleNamespace(remote=lambda _: None))
    args = SimpleNamespace(
        world_size=len(of_ranks), sequence_parallel_size=1, with_tracking=True, load_ref_policy=False
    )

    def got(calls: Sequence[Mapping[str, float]], **_: Any) -> tuple[list[Any], None]:
        return [({**one, **times}, lengths) for one in calls], None

    with (
        patch.object(grpo_fast, "ray_get_with_progress", got),
        patch.object(grpo_fast.ray, "get", lambda value: value),
        patch.object(grpo_fast, "maybe_save_checkpoint", lambda *_: 0.0),
        patch.object(grpo_fast.utils, "calculate_utilization_metrics", lambda **_: {}),
        patch.object(grpo_fast, "print_rich_single_line_metrics", lambda _: None),
        patch.object(grpo_fast, "wandb", SimpleNamespace(log=lambda found, **_: logged.update(found))),
    ):
        grpo_fast.one_training_step(
            args,
            SimpleNamespace(num_samples_per_prompt_rollout=1),
            SimpleNamespace(vllm_num_engines=1, vllm_tensor_parallel_size=1),
            SimpleNamespace(models=learners),
            None,
            {},
            1,
            1,
            0,
            0.0,
            [None],
            0.0,
            "",
            "",
            None,
            manager,
        )
    return {name: float(value) for name, value in logged.items() if isinstance(value, (int, float))}
