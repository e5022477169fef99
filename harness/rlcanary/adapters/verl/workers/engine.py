"""verl's FSDP engine on one CPU: its own methods, without FSDP, Ray or an accelerator, and the data that it takes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from rlcanary.adapters.batches import tokens_of_completions
from rlcanary.adapters.frameworks import quiet

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, PolicyBatch


def new_engine(
    actor_config: Any,
    group: Any,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    kind: str = "FSDPEngineWithLMHead",
) -> Any:
    """Make verl's engine for one rank of a process group without its constructor, which builds FSDP on a GPU."""
    import torch
    from verl.utils.torch_functional import entropy_from_logits
    from verl.workers.engine.fsdp import transformer_impl

    engine_class = getattr(transformer_impl, kind)
    engine = engine_class.__new__(engine_class)
    engine.engine_config = actor_config.engine
    engine.optimizer_config = actor_config.optim
    engine.module = model
    engine.optimizer = optimizer
    engine.lr_scheduler = scheduler
    engine.get_data_parallel_group = lambda: group
    engine.get_data_parallel_size = lambda: group.size()
    engine.ulysses_parallel_group = None
    engine.ulysses_device_mesh = None
    engine.ulysses_sequence_parallel_size = 1
    engine.use_ulysses_sp = False
    engine.pad_to_length = False
    engine.compute_entropy_from_logits = entropy_from_logits
    engine._autocast_dtype = torch.float32
    engine.to = lambda *_, **__: None  # there is nothing to move, and 0.10 collects garbage at each call
    engine._is_offload_param = engine._is_offload_optimizer = engine._qat_enabled = False
    return engine


def on_ranks(n_ranks: int, run: Callable[[int, Any], Any]) -> list[Any]:
    """Call `run(rank, process group)` on every rank of a data-parallel group of threads, with the CPU as verl's platform."""
    key = os.getpid(), n_ranks  # a fork has none of the threads of its parent's groups
    if key not in _groups:
        _groups[key] = _new_groups(n_ranks)
    if n_ranks == 1:
        with _on_cpu():
            return [run(0, _groups[key][0])]
    with _on_cpu(), ThreadPoolExecutor(n_ranks) as pool:
        try:
            return list(pool.map(run, range(n_ranks), _groups[key]))
        except BaseException:
            # One rank may have called a collective that another has not.
            del _groups[key]
            raise


# To connect the ranks takes longer than most calls.
_groups: dict[tuple[int, int], list[Any]] = {}


def _new_groups(n_ranks: int) -> list[Any]:
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]

    def connected(rank: int) -> Any:
        return dist.ProcessGroupGloo(store, rank, n_ranks, timedelta(seconds=60))

    with ThreadPoolExecutor(n_ranks) as pool:
        return list(pool.map(connected, range(n_ranks)))


# The CPU as a platform of verl's, whose accelerator has no memory.
CPU = SimpleNamespace(
    device_name="cpu",
    current_device=lambda: "cpu",
    is_available=lambda: False,
    set_allocator_settings=lambda _: None,
    device_module=SimpleNamespace(
        **dict.fromkeys(
            ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"), lambda *_: 0
        ),
        mem_get_info=lambda: (0, 0),
        current_device=lambda: "cpu",
        is_available=lambda: False,
        **dict.fromkeys(("empty_cache", "synchronize"), lambda: None),
    ),
)


# Older modules that ask for the accelerator's memory.
MEMORY = ("device", "memory_utils")


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Hide the missing accelerator from verl, which takes a machine without one for a misconfigured one with."""
    try:
        from verl.plugin.platform import get_platform, set_platform
    except ModuleNotFoundError:  # older releases take a machine without one as it is, but for its memory
        given = [mock.patch(f"verl.utils.{name}.get_torch_device", return_value=CPU.device_module) for name in MEMORY]
        with quiet(), given[0], given[1]:
            yield
        return
    with quiet():
        platform = get_platform()
        set_platform(CPU)
        try:
            yield
        finally:
            set_platform(platform)


def given_outputs(given: PolicyBatch, micro_batch: Any, **_: Any) -> dict[str, Tensor]:
    """Replace the engine's outputs by the logprobs and entropies of a batch."""
    outputs = {"log_probs": _outputs_of(given.logprobs, micro_batch)}
    if given.entropy is not None:
        outputs["entropy"] = _outputs_of(given.entropy, micro_batch)
    return outputs


def given_values(values_BT: Tensor, micro_batch: Any, **_: Any) -> dict[str, Tensor]:
    """Replace the engine's outputs by these values of a critic."""
    return {"values": _outputs_of(values_BT, micro_batch)}


def _outputs_of(values_BT: Tensor, micro_batch: Any) -> Tensor:
    """Return the rows of a micro-batch as a model's outputs, which stand one position before the tokens that they score."""
    import torch

    rows = values_BT[micro_batch["row"]]
    # The last scores nothing.
    return jagged(torch.cat([rows, torch.zeros_like(rows[:, :1])], dim=1))


def tensordict(tensors: dict[str, Tensor], **others: Any) -> Any:
    """Build the TensorDict that verl's driver sends to its workers."""
    import torch
    from verl.utils import tensordict_utils

    if "prompts" in tensors and "attention_mask" not in tensors and keeps_padding():
        ids, prompts, responses = (tensors[name] for name in ("input_ids", "prompts", "responses"))
        of_rows = torch.ones_like(ids) if prompts.is_nested else torch.ones_like(torch.cat([prompts, responses], dim=1))
        tensors = {**tensors, "attention_mask": of_rows}
    return tensordict_utils.get_tensordict(tensors, others)


@cache
def keeps_padding() -> bool:
    """Tell whether verl's losses take responses with their padding and its mask, as older ones do that add none."""
    from verl.workers.utils.losses import ppo_loss

    return "to_padded_tensor" not in inspect.getsource(ppo_loss)


def sent(values: Tensor) -> Tensor:
    """Return what belongs to responses [B, T] as verl's driver sends it to its workers."""
    return values if keeps_padding() else ragged(list(values))


def sequences(batch: CollatedBatch) -> dict[str, Tensor]:
    """Return the rows as verl's rollouts do: ragged, without padding."""
    import torch

    prompts = [
        ids[:start][kept[:start]]
        for ids, kept, start in zip(
            batch.input_ids, batch.attention_mask, batch.completion_starts.tolist(), strict=True
        )
    ]
    are_tokens_BT = tokens_of_completions(batch)
    completions = [ids[kept] for ids, kept in zip(batch.completion_ids, are_tokens_BT, strict=True)]
    rows = [torch.cat(pair) for pair in zip(prompts, completions, strict=True)]
    mask = [each[kept].long() for each, kept in zip(batch.completion_mask, are_tokens_BT, strict=True)]
    fields = {
        "input_ids": ragged(rows),
        "position_ids": ragged([torch.arange(len(ids)) for ids in rows]),
    }
    if keeps_padding():
        return fields | _padded(prompts, completions, mask)
    return fields | {
        "prompts": ragged(prompts),
        "responses": ragged(completions),
        "response_mask": ragged(mask),
        "loss_mask": ragged(mask),
    }


def _padded(prompts: list[Tensor], completions: list[Tensor], mask: list[Tensor]) -> dict[str, Tensor]:
    """Return what an older verl calls rows without padding: that of the responses stays, and that of the prompts beside."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def left(rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_side="left")

    def right(rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True)

    ones = [[torch.ones_like(each) for each in part] for part in (prompts, completions)]
    return {
        "attention_mask": torch.cat([left(ones[0]), right(ones[1])], dim=1),
        "prompts": left(prompts),
        "responses": right(completions),
        "response_mask": right(mask),
        "loss_mask": right(mask),
    }


def jagged(values: Tensor) -> Tensor:
    """Convert [B, T] to the nested tensor that verl's workers receive."""
    import torch

    rows, width = values.shape
    offsets = torch.arange(0, rows * width + 1, width)
    with quiet():
        return torch.nested.nested_tensor_from_jagged(values.flatten().contiguous(), offsets)


def ragged(rows: list[Tensor]) -> Tensor:
    """Join rows of different lengths into one nested tensor."""
    import torch

    with quiet():
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
