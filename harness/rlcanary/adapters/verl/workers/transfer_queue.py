"""Stand-ins for what verl imports and a CPU lacks: TransferQueue, the store on Ray that holds the rows of a step."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.contract.adapter import NotProvided

V1 = "verl.trainer.ppo.v1"
# The modules that read and write rows.
USERS = (f"{V1}.trainer_base", f"{V1}.replay_buffer", f"{V1}.agent_loop_tq", "verl.trainer.ppo.padding_utils")


@dataclass
class Rows:
    """Rows of the store by their keys, `{group}_{session}_{index}`: what verl calls a KVBatchMeta.

    Attributes:
        keys: the keys, in order.
        tags: what is noted of each row.
        partition_id: the part of the store.
        extra_info: settings of the next call of a worker.
    """

    keys: list[str]
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str = "train"
    extra_info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    def reorder(self, places: Sequence[int]) -> None:
        self.keys = [self.keys[place] for place in places]
        self.tags = [self.tags[place] for place in places]


class Store:
    """The store as a dictionary."""

    KVBatchMeta = Rows

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any = None, tags: Any = None) -> Rows:
        import torch

        for name in () if fields is None else list(fields.keys()):
            values = fields[name].unbind() if isinstance(fields[name], torch.Tensor) else list(fields[name])
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault(key, {})[name] = value
        for place, key in enumerate(keys):
            self.rows.setdefault(key, {})
            self.tags.setdefault(key, {}).update(tags[place] if tags else {})
        return Rows(keys, [self.tags[key] for key in keys], partition_id)

    async def async_kv_put(self, key: str, partition_id: str, tag: Any) -> None:
        self.kv_batch_put([key], partition_id, tags=[tag])

    async def async_kv_batch_put(
        self, keys: list[str], partition_id: str, fields: Any = None, tags: Any = None
    ) -> None:
        self.kv_batch_put(keys, partition_id, fields, tags)

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: Sequence[str] | None = None) -> Any:
        import torch
        from verl.utils import tensordict_utils

        names = [name for name in self.rows[keys[0]] if select_fields is None or name in select_fields]
        columns: dict[str, Any] = {name: [self.rows[key][name] for key in keys] for name in names}
        for name, values in columns.items():
            if isinstance(values[0], torch.Tensor):
                columns[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        return tensordict_utils.get_tensordict(columns)

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.rows.pop(key, None)


@cache
def trainer_module() -> ModuleType:
    """Import verl's default trainer, which imports TransferQueue.

    Raises:
        NotProvided: this version of verl has none.
    """
    stand_in = ModuleType("transfer_queue")
    stand_in.KVBatchMeta = Rows  # type: ignore[attr-defined]
    # verl can do without this engine of NPUs, which imports vLLM.
    hidden: dict[str, Any] = {"transfer_queue": stand_in, "verl.checkpoint_engine.hccl_checkpoint_engine": None}
    installed = {name: sys.modules[name] for name in hidden if name in sys.modules}
    sys.modules.update(hidden)
    try:
        with quiet():
            return importlib.import_module(f"{V1}.trainer_base")
    except ModuleNotFoundError as error:
        raise NotProvided(f"this version of verl has no module {error.name}") from error
    finally:
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(installed)


@contextmanager
def stored() -> Iterator[Store]:
    """Have verl's trainer keep its rows in a new store."""
    trainer_module()
    store, before = Store(), {name: sys.modules[name].tq for name in USERS}
    for name in USERS:
        sys.modules[name].tq = store  # type: ignore[attr-defined]
    try:
        yield store
    finally:
        for name, module in before.items():
            sys.modules[name].tq = module  # type: ignore[attr-defined]
