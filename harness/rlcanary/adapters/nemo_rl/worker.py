"""NeMo RL's policy worker in this process: its own methods on an object without Ray, FSDP or a GPU."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.stubs import absent, newer_typed_dicts, stub_of

if TYPE_CHECKING:
    from torch import Tensor

# Loggers, watchers and the library that shards models: the checks call none of them.
SERVICES = (
    "mlflow",
    "swanlab",
    "wandb",
    "nvidia_resiliency_ext",
    "soundfile",
    "nemo_automodel",
    "megatron",
    "nixl",
    "hydra",
    "decord",
)
# Builds and shards a model; it refuses to be imported beside a stub of nemo_automodel.
SETUP = "nemo_rl.models.automodel.setup"


@contextmanager
def importing() -> Iterator[None]:
    """Let NeMo RL be imported where its services are not installed, without its messages."""
    with absent(*SERVICES), newer_typed_dicts(), quiet(), contextlib.redirect_stdout(io.StringIO()):
        yield


def workers() -> ModuleType:
    """Import the module of the policy worker."""
    with stub_of(SETUP, "nemo_automodel"), importing():
        from nemo_rl.models.policy.workers import dtensor_policy_worker_v2

    module: ModuleType = dtensor_policy_worker_v2
    return module


@contextmanager
def on_cpu() -> Iterator[None]:
    """Run a worker, which names the GPU and the processes of its group, on the CPU and as the only process."""
    import torch

    module, make = workers(), torch.tensor

    def made(data: Any, **options: Any) -> Tensor:
        return make(data, **{name: value for name, value in options.items() if (name, value) != ("device", "cuda")})

    def stay(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    def clipped(max_norm: float | None, models: list[Any], **_: Any) -> float:
        """Clip as the library does for one process."""
        parameters = [each for model in models for each in model.parameters() if each.requires_grad]
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm or torch.inf))

    with ExitStack() as stack:
        for place, name, value in (
            (torch, "tensor", made),
            (torch.Tensor, "cuda", stay),
            (torch.distributed, "all_reduce", lambda *_, **__: None),
            (torch.distributed, "get_rank", lambda *_: 0),
            (torch.cuda, "empty_cache", lambda: None),
            (torch.cuda.nvtx, "range_push", lambda _: None),
            (torch.cuda.nvtx, "range_pop", lambda: None),
            (torch.cuda, "get_device_name", lambda: "none"),
            (module, "scale_grads_and_clip_grad_norm", clipped),
            (module, "get_train_context_automodel", lambda *_: contextlib.nullcontext),
            (module, "get_cpu_state_dict", lambda items, **_: {key: each.clone() for key, each in items}),
            (module, "to_local_if_dtensor", lambda tensor: tensor),
        ):
            stack.enter_context(patch.object(place, name, value))
        stack.enter_context(quiet())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


def new_worker(state: Any, rows: int, temperature: float, max_grad_norm: float | None) -> Any:
    """Make the policy worker of one process, which takes all rows at once.

    Args:
        state: the model, its optimizer and scheduler, and the reference model or None.
        rows: of an update.
        temperature: of the samples.
        max_grad_norm: None clips nothing.
    """
    import torch
    from nemo_rl.algorithms.logits_sampling_utils import TrainingSamplingParams
    from nemo_rl.utils.timer import Timer

    worker_class = workers().DTensorPolicyWorkerV2Impl
    worker = worker_class.__new__(worker_class)
    worker.cfg = {
        "train_global_batch_size": rows,
        "train_micro_batch_size": rows,
        "logprob_batch_size": rows,
        "dynamic_batching": {"enabled": False},
        "sequence_packing": {"enabled": False},
        "dtensor_cfg": {},
    }
    worker.model, worker.optimizer, worker.scheduler = state.model, state.optimizer, state.scheduler
    reference = getattr(state, "ref_model", None)
    worker.reference_model_state_dict = None if reference is None else reference.state_dict()
    worker.tokenizer, worker.timer = None, Timer()
    worker.dp_mesh = SimpleNamespace(get_group=lambda: None)
    worker.device_mesh = worker.tp_mesh = worker.cp_mesh = worker.moe_mesh = None
    worker.dp_size = worker.cp_size = worker.tp_size = 1
    worker.dtype, worker.autocast_enabled, worker.enable_seq_packing = torch.float32, False, False
    worker.allow_flash_attn_args, worker._is_reward_model = False, False
    worker.max_grad_norm = max_grad_norm
    worker.sampling_params = TrainingSamplingParams(temperature=temperature)
    return worker
