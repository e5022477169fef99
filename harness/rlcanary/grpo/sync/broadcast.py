"""Broadcast weights between two processes: NCCL from GPU to GPU, Gloo without GPUs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Backend = Literal["nccl", "gloo"]


class BroadcastTransport:
    """Broadcasts in a process group of trainer and engine made for each sync, so that neither is bound in between.

    NCCL needs a GPU of its own on either side.
    """

    def __init__(self, backend: Backend, host: str | None = None, timeout_s: float = 60.0) -> None:
        """Choose the backend and the addresses.

        Args:
            backend: "nccl" or "gloo".
            host: this machine's address as engines see it; None finds it out.
            timeout_s: limit after which a transfer has failed.
        """
        self.backend = backend
        self.timeout_s = timeout_s
        self._host = host or _address()

    @contextmanager
    def send(self, weights: Sequence[tuple[str, Tensor]]) -> Iterator[Any]:
        """Send weights, see `Transport.send`. They leave while the parcel, their description, is being delivered."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(
            self._host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self.timeout_s)
        )
        sent: Future[None] = Future()

        def run() -> None:
            try:
                self._broadcast(store, 0, [weight.detach().to(self._device) for _, weight in weights])
                sent.set_result(None)
            except Exception as error:  # noqa: BLE001 - raised again in the trainer's thread
                sent.set_exception(error)

        threading.Thread(target=run, name="weight broadcast", daemon=True).start()
        described = [(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape)) for name, weight in weights]
        yield store.port, described
        sent.result(timeout=self.timeout_s)

    def deliver(self, parcel: Any) -> Iterable[tuple[str, Tensor]]:
        """Receive weights, see `Transport.deliver`."""
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        port, described = parcel
        store = TCPStore(self._host, port, is_master=False, timeout=timedelta(seconds=self.timeout_s))
        tensors = [torch.empty(tuple(shape), dtype=getattr(torch, dtype)) for _, dtype, shape in described]
        arrived = self._broadcast(store, 1, [tensor.to(self._device) for tensor in tensors])
        return [(name, tensor) for (name, _, _), tensor in zip(described, arrived, strict=True)]

    @property
    def _device(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"

    def _broadcast(self, store: Any, rank: int, tensors: list[Tensor]) -> list[Tensor]:
        import torch
        import torch.distributed as dist

        make: Any = getattr(dist, {"nccl": "ProcessGroupNCCL", "gloo": "ProcessGroupGloo"}[self.backend])
        group = make(store, rank, 2, timedelta(seconds=self.timeout_s))
        contiguous = [tensor.contiguous() for tensor in tensors]
        for tensor in contiguous:
            group.broadcast(tensor, 0).wait()
        if self.backend == "nccl":
            torch.cuda.synchronize()
        return contiguous


def _address() -> str:
    """Find the address at which other nodes of a Ray cluster reach this one; without Ray all is on this machine."""
    import sys

    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    return socket.gethostbyname("localhost")
