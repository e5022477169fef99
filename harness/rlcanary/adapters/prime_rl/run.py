"""prime-rl's training loop in this process: one step of its `train` on one process of the CPU.

The loop is one function. Everything that it sets up comes from here, and it does the rest: the forward pass, the loss, the
backward pass, the clipping, the updates of weights and learning rate, and the numbers that it logs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.prime_rl import earlier, earlier_run
from rlcanary.adapters.prime_rl.services import SERVICES
from rlcanary.adapters.stubs import absent
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.adapters.prime_rl.rows import Row


def loop() -> ModuleType:
    """Import the module of the training loop."""
    with absent(*SERVICES), quiet():
        import prime_rl.trainer.rl.train

    module: ModuleType = prime_rl.trainer.rl.train
    return module


class Step:
    """One step of the loop.

    Attributes:
        logged: the numbers that it logged, by their names.
        logprobs: [S] of each row's tokens, in the order of the rows; the first token of a row has none.
    """

    def __init__(self, state: Any, rows: list[Row], config: Any) -> None:
        """Train once on the rows, which are packed into micro-batches of no more tokens than the longest has."""
        self.logged: dict[str, float] = {}
        self._scores: dict[tuple[int, ...], list[Tensor]] = {}
        with absent(*SERVICES), quiet():
            micro_batches = _packed(rows)
        with _on_cpu(self, state, micro_batches):
            loop().train.__wrapped__(config)
        self.logprobs = [self._scores[tuple(row.token_ids)].pop(0) for row in rows]

    def note(self, micro_batch: Mapping[str, Any], logprobs: Tensor) -> None:
        """Keep the logprobs of the rows of a micro-batch."""
        rows = zip(
            micro_batch["input_ids"].squeeze(0).split(micro_batch["sequence_lengths"]),
            logprobs.detach().squeeze(0).split(micro_batch["sequence_lengths"]),
            strict=True,
        )
        for ids, scores in rows:
            self._scores.setdefault(tuple(ids.tolist()), []).append(scores)


def _packed(rows: list[Row]) -> list[Any]:
    if not earlier.has_components():
        return earlier_run.packed(rows)
    from prime_rl.trainer.batch import build_bin_cost, prepare_batch
    from prime_rl.trainer.rl.data import DataLoader
    from prime_rl.transports.rollouts.types import TrainingSample

    samples = [
        TrainingSample(
            token_ids=row.token_ids,
            mask=row.mask,
            logprobs=row.logprobs,
            temperatures=[row.temperature] * len(row.token_ids),
            env_name="env",
            advantages=[0.0] * row.start + [row.advantage] * (len(row.token_ids) - row.start),
        )
        for row in rows
    ]
    loader = DataLoader.__new__(DataLoader)
    (packed,) = prepare_batch(samples, max(len(row.token_ids) for row in rows), 1, build_bin_cost(None))
    return [loader._micro_batch_to_tensor(each) for each in packed]


def _with_head(model: Any) -> Any:
    """Return the model, with the same parameters, under the head that prime-rl sets into every model."""
    from prime_rl.trainer.models.layers import lm_head

    if not hasattr(model, "model") or not hasattr(model, "lm_head") or model.lm_head.bias is not None:
        raise NotProvided("models have a `model`, and a `lm_head` without a bias")
    headed = copy.copy(model)
    headed._modules = dict(model._modules)
    headed.config = copy.copy(model.config)
    headed.config.use_cache = False  # as for every model that prime-rl loads
    headed.model = copy.copy(model.model)
    headed.model.config = headed.config
    with patch.object(lm_head, "get_logger", _silent):
        lm_head.inject_prime_lm_head(headed)
    return headed


def _silent() -> Any:
    return SimpleNamespace(
        **{level: lambda *_, **__: None for level in ("debug", "info", "success", "warning", "error")}
    )


@contextmanager
def _on_cpu(step: Step, state: Any, micro_batches: list[Any]) -> Iterator[None]:
    import torch

    module, make, move = loop(), torch.tensor, torch.Tensor.to
    from prime_rl.trainer import utils

    def made(data: Any, **options: Any) -> Tensor:
        return make(data, **{name: value for name, value in options.items() if (name, value) != ("device", "cuda")})

    def moved(tensor: Tensor, *where: Any, **options: Any) -> Tensor:
        return tensor if where in (("cuda",), (torch.device("cuda"),)) else move(tensor, *where, **options)

    async def nothing(*_: Any, **__: Any) -> None:
        return None

    async def log(metrics: Mapping[str, float], **_: Any) -> None:
        step.logged |= metrics

    def gather(found: list[Any], mine: Any) -> None:
        found[:] = [mine]

    def clipped(parameters: Any, max_norm: float, **_: Any) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    headed = _with_head(state.model)
    mesh = SimpleNamespace(size=lambda: 1, get_group=lambda: None)
    dims = SimpleNamespace(
        cp_enabled=False,
        cp=1,
        ep_enabled=False,
        dp_replicate=1,
        fsdp_gradient_divide_factor=1,
        get_mesh=lambda _: mesh,
        world_mesh=None,
    )
    exporter = SimpleNamespace(
        export=lambda _step, _micro, given, out, *_: step.note(given, out["logprobs"]), close=bool
    )
    loader = SimpleNamespace(wait_for_batch=lambda: None, get_batch=lambda: micro_batches)
    perf = SimpleNamespace(get_step_tokens_per_second=lambda *_: 0.0, get_step_mfu=lambda *_: 0.0)
    world = SimpleNamespace(is_master=True, local_rank=0, rank=0, world_size=1)
    if earlier.has_components():
        own = [
            (utils, "torch_clip_grad_norm_", clipped),
            (module.monitors, "setup", nothing),
            (module.monitors, "log", log),
            (module, "resolve_ep", nothing_of),
            (module, "setup_ckpt_manager", nothing_of),
            (module, "setup_optimizer", lambda *_, **__: (state.optimizer, None)),
            (module, "setup_token_exporter", lambda *_: exporter),
        ]
    else:
        own = earlier_run.places(module, state, micro_batches, step.note, step.logged)
    with ExitStack() as stack:
        for place, name, value in (
            *own,
            (torch, "tensor", made),
            (torch.Tensor, "to", moved),
            (torch.Tensor, "cuda", lambda tensor: tensor),
            (torch.cuda, "reset_peak_memory_stats", lambda: None),
            (torch.cuda, "max_memory_reserved", lambda: 0),
            (torch.distributed, "is_initialized", lambda: True),
            (torch.distributed, "get_world_size", lambda *_: 1),
            (torch.distributed, "all_reduce", lambda *_, **__: None),
            (torch.distributed, "all_gather_object", gather),
            (utils, "flexible_all_gather", lambda tensor: tensor),
            (module, "get_world", lambda: world),
            (module, "setup_logger", lambda *_, **__: _silent()),
            (module, "setup_torch_distributed", nothing_of),
            (module, "get_parallel_dims", lambda _: dims),
            (module, "setup_model", lambda *_: headed),
            (module, "setup_scheduler", lambda *_: state.scheduler),
            (module, "setup_weight_broadcast", nothing_of),
            (module, "DataLoader", lambda *_: loader),
            (module, "maybe_activation_offloading", lambda _: nullcontext()),
            (module, "get_perf_counter", lambda *_: perf),
            (module, "get_ckpt_disk_metrics", lambda _: {}),
        ):
            stack.enter_context(patch.object(place, name, value))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(quiet())
        stack.enter_context(torch.enable_grad())
        yield


def nothing_of(*_: Any, **__: Any) -> None:
    """Do nothing: there are no other processes, checkpoints or engines."""
