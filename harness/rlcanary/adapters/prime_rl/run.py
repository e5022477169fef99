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

from rlcanary.adapters.batches import prompts_of, tokens_of_completions
from rlcanary.adapters.frameworks import part, quiet
from rlcanary.adapters.stubs import absent
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch

# Sandboxes, loggers, transports and kernels: the checks call none of them.
SERVICES = (
    *("tenacity", "prime_sandboxes", "prime_tunnel", "prime_evals", "prime_cli", "prime_runs"),
    *("wandb", "wandb_gql", "wandb_workspaces", "setproctitle", "prometheus_client", "modelexpress", "nixl", "zmq"),
    *("quack", "flash_attn", "ring_flash_attn", "torchao", "torchtitan", "dion", "deep_ep", "grouped_gemm", "fla"),
)


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

    def __init__(self, state: Any, samples: list[Any], config: Any) -> None:
        """Train once on the samples, which are packed into micro-batches of no more tokens than the longest has."""
        self.logged: dict[str, float] = {}
        self._scores: dict[tuple[int, ...], list[Tensor]] = {}
        with _on_cpu(self, state, _packed(samples)):
            loop().train.__wrapped__(config)
        self.logprobs = [self._scores[tuple(sample.token_ids)].pop(0) for sample in samples]

    def note(self, micro_batch: Mapping[str, Any], logprobs: Tensor) -> None:
        """Keep the logprobs of the rows of a micro-batch."""
        rows = zip(
            micro_batch["input_ids"].squeeze(0).split(micro_batch["sequence_lengths"]),
            logprobs.detach().squeeze(0).split(micro_batch["sequence_lengths"]),
            strict=True,
        )
        for ids, scores in rows:
            self._scores.setdefault(tuple(ids.tolist()), []).append(scores)


def samples_of(batch: CollatedBatch, temperature: float, advantages: Tensor) -> list[Any]:
    """Make the samples that the orchestrator sends of the rows of a batch."""
    import torch

    with absent(*SERVICES), quiet():
        make = part("prime_rl.transports.rollouts.types:TrainingSample")
    samples = []
    rows = zip(prompts_of(batch), tokens_of_completions(batch), strict=True)
    for row, (prompt, kept) in enumerate(rows):
        ids, trained = batch.completion_ids[row][kept], batch.completion_mask[row][kept]
        logprobs = torch.zeros(len(ids)) if batch.old_logprobs is None else batch.old_logprobs[row][kept].nan_to_num()
        before, length = [0.0] * len(prompt), len(prompt) + len(ids)
        samples.append(
            make(
                token_ids=[*prompt.tolist(), *ids.tolist()],
                mask=[False] * len(prompt) + trained.tolist(),
                logprobs=before + logprobs.tolist(),
                temperatures=[temperature] * length,
                env_name="env",
                advantages=before + [float(advantages[row])] * len(ids),
            )
        )
    return samples


def _packed(samples: list[Any]) -> list[Any]:
    from prime_rl.trainer.batch import build_bin_cost, prepare_batch
    from prime_rl.trainer.rl.data import DataLoader

    loader = DataLoader.__new__(DataLoader)
    (packed,) = prepare_batch(samples, max(len(sample.token_ids) for sample in samples), 1, build_bin_cost(None))
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
        return tensor if where == ("cuda",) else move(tensor, *where, **options)

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
    with ExitStack() as stack:
        for place, name, value in (
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
            (utils, "torch_clip_grad_norm_", clipped),
            (module, "get_world", lambda: world),
            (module, "setup_logger", lambda *_, **__: _silent()),
            (module.monitors, "setup", nothing),
            (module.monitors, "log", log),
            (module, "setup_torch_distributed", nothing_of),
            (module, "resolve_ep", nothing_of),
            (module, "get_parallel_dims", lambda _: dims),
            (module, "setup_ckpt_manager", nothing_of),
            (module, "setup_model", lambda *_: headed),
            (module, "setup_optimizer", lambda *_, **__: (state.optimizer, None)),
            (module, "setup_scheduler", lambda *_: state.scheduler),
            (module, "setup_weight_broadcast", nothing_of),
            (module, "DataLoader", lambda *_: loader),
            (module, "setup_token_exporter", lambda *_: exporter),
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
