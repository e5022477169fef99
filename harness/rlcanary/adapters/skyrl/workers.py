"""SkyRL's trainer and policy worker in this process: its own methods on objects without Ray, FSDP or a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from rlcanary.adapters.frameworks import quiet


@contextmanager
def on_cpu() -> Iterator[None]:
    """Run workers, which ask for the current GPU, on the CPU, and without SkyRL's messages."""
    import torch
    from loguru import logger

    before = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    logger.disable("skyrl")
    try:
        with quiet():
            yield
    finally:
        torch.cuda.current_device = before
        logger.enable("skyrl")


def config_of(settings: Mapping[str, Any]) -> Any:
    """Make a `SkyRLTrainConfig` with these fields of its `AlgorithmConfig`, and the epochs of an update."""
    from skyrl.train.config import SkyRLTrainConfig

    config = SkyRLTrainConfig()
    algorithm = config.trainer.algorithm
    # As SkyRL's validation of a configuration does.
    algorithm.temperature = config.generator.sampling_params.temperature
    for name, value in settings.items():
        if name == "update_epochs_per_batch":
            config.trainer.update_epochs_per_batch = value
        elif name != "mini_batches":
            *path, last = name.split(".")
            place = algorithm
            for part in path:
                place = getattr(place, part)
            if not hasattr(place, last):
                raise AttributeError(f"AlgorithmConfig has no field {name}")
            setattr(place, last, value)
    return config


def new_trainer(config: Any, dispatch: Any = None, pad_token_id: int = 0, has_reference: bool = False) -> Any:
    """Make a trainer with what its methods for one batch read."""
    from skyrl.train.trainer import RayPPOTrainer

    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.cfg = config
    trainer.tokenizer = SimpleNamespace(pad_token_id=pad_token_id)
    trainer.dispatch = dispatch
    trainer.all_metrics, trainer.all_timings, trainer.global_step = {}, {}, 1
    trainer.ref_model = object() if has_reference else None
    trainer.reward_kl_controller = None
    trainer.dynamic_sampling_state = None
    return trainer


def new_reference(config: Any, model: Any) -> Any:
    """Make a worker of the reference model."""
    from skyrl.backends.skyrl_train.workers.worker import RefWorkerBase

    worker = RefWorkerBase.__new__(RefWorkerBase)
    worker.cfg, worker.model = config.trainer, model
    return worker


def new_worker(config: Any, model: Any, strategy: Any, ranks: int = 1, state: Any = None) -> Any:
    """Make a policy worker of a group of data-parallel ranks."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase

    worker = PolicyWorkerBase.__new__(PolicyWorkerBase)
    worker.cfg = config.trainer
    worker.model = model
    worker.strategy = strategy
    worker.optimizer = getattr(state, "optimizer", None)
    worker.scheduler = getattr(state, "scheduler", SimpleNamespace(get_last_lr=lambda: [0.0]))
    worker.mesh_rank = SimpleNamespace(dp_size=ranks)
    worker.device_mesh = SimpleNamespace(get_group=lambda _: None)
    worker.policy_loss_fn = PolicyLossRegistry.get(config.trainer.algorithm.policy_loss_type)
    return worker


def new_strategy(max_norm: float = 0.0) -> Any:
    """Make the FSDP strategy of one rank, whose backward pass and optimizer step need neither FSDP nor a GPU."""
    from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy

    strategy = FSDPStrategy.__new__(FSDPStrategy)
    strategy.max_norm = max_norm
    strategy.all_reduce = lambda values, **_: dict(values)
    return strategy


class Ranks:
    """A strategy that keeps the losses which go backward, and then reduces the metrics of all ranks."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.metrics: list[dict[str, float]] = []

    def backward(self, loss: Any, model: Any, optimizer: Any) -> None:
        self.losses.append(loss)

    def all_reduce(self, values: dict[str, float], op: str, group: Any) -> dict[str, float]:
        """Keep these metrics of a rank, under the operation that reduces them."""
        self.metrics.append({f"{op} {name}": value for name, value in values.items()})
        return values

    def reduced(self) -> dict[str, float]:
        """Reduce what the ranks gave, as torch.distributed does."""
        found: dict[str, list[float]] = {}
        for each in self.metrics:
            for name, value in each.items():
                found.setdefault(name, []).append(value)
        reductions: dict[str, Callable[[list[float]], float]] = {
            "mean": lambda values: sum(values) / len(values),
            "sum": sum,
            "min": min,
            "max": max,
        }
        pairs = ((name.split(" ", 1), values) for name, values in found.items())
        return {name: reductions[op](values) for (op, name), values in pairs}


class Dispatch:
    """The trainer's dispatch to one policy worker and the reference, called in place."""

    def __init__(self, workers: Mapping[str, Any]) -> None:
        self.workers = workers

    def get_lcm_dp_size(self) -> int:
        return 1

    def empty_cache(self, model: str | None = None) -> None:
        """Do nothing: there is no GPU."""

    def forward(self, model: str, data: Any) -> Any:
        return self.workers[model].forward(copy.deepcopy(data))

    def stage_data(self, model: str, data: Any, boundaries: list[tuple[int, int]]) -> list[Any]:
        return [data[start:end] for start, end in boundaries]

    def forward_from_staged(self, model: str, chunk: Any) -> Any:
        return self.forward(model, chunk)

    def forward_backward_from_staged(self, model: str, chunk: Any) -> Any:
        return self.workers[model].forward_backward(chunk)

    def optim_step(self, model: str) -> float:
        norm: float = self.workers[model].optim_step()
        return norm
