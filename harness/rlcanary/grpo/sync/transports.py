"""Transports of weights from the trainer to an engine. To add one, write one class with `send` and `deliver`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlcanary.errors import UserError
from rlcanary.system.files import write_whole

if TYPE_CHECKING:
    from torch import Tensor

Weights = Sequence[tuple[str, "Tensor"]]
# A tensor that crosses any process border: name, dtype, shape and its bytes.
Packed = tuple[str, str, tuple[int, ...], bytes]


class Transport(Protocol):
    """One way for weights to travel. An object of it, and the parcel, can be pickled to where the engine is."""

    def send(self, weights: Weights) -> AbstractContextManager[Any]:
        """Yield a parcel, in the trainer's process; its resources are gone afterwards."""

    def deliver(self, parcel: Any) -> Iterable[tuple[str, Tensor]]:
        """Open a parcel, in the engine's process."""


class CopyTransport:
    """The tensors themselves, for an engine in the trainer's own process."""

    @contextmanager
    def send(self, weights: Weights) -> Iterator[Any]:
        yield weights

    def deliver(self, parcel: Any) -> Iterable[tuple[str, Tensor]]:
        return list(parcel)


class BytesTransport:
    """Bytes inside the request. Engines' request channels are made for short messages: for small models."""

    @contextmanager
    def send(self, weights: Weights) -> Iterator[Any]:
        yield [pack(name, weight) for name, weight in weights]

    def deliver(self, parcel: Any) -> Iterable[tuple[str, Tensor]]:
        return [unpack(packed) for packed in parcel]


class FileTransport:
    """A safetensors file in a folder that both sides see; written whole, and gone after the sync."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def send(self, weights: Weights) -> Iterator[Any]:
        from safetensors.torch import save

        path = self.folder / "weights.safetensors"
        write_whole(path, save({name: weight.cpu().contiguous() for name, weight in weights}))
        try:
            yield str(path)
        finally:
            path.unlink(missing_ok=True)

    def deliver(self, parcel: Any) -> Iterable[tuple[str, Tensor]]:
        from safetensors.torch import load_file

        return list(load_file(parcel).items())


class RayTransport(BytesTransport):
    """Ray's object store, which every node of the cluster reads from: stored once, however many engines there are."""

    @contextmanager
    def send(self, weights: Weights) -> Iterator[Any]:
        import ray

        with super().send(weights) as packed:
            # In a list, the reference itself reaches the engine; as an argument alone Ray would replace it by its value.
            yield [ray.put(packed)]

    def deliver(self, parcel: Any) -> Iterable[tuple[str, Tensor]]:
        import ray

        return super().deliver(ray.get(parcel[0]))


def transport_of(kind: str, folder: Path) -> Transport:
    """Create the transport of this name.

    Raises:
        UserError: there is none.
    """
    match kind:
        case "copy":
            return CopyTransport()
        case "bytes":
            return BytesTransport()
        case "file":
            return FileTransport(folder.absolute())
        case "ray":
            return RayTransport()
    raise UserError(f"runtime.transport is {kind!r}, there are copy, bytes, file and ray")


def pack(name: str, weight: Tensor) -> Packed:
    """Pack a tensor as plain values."""
    import torch

    content = weight.detach().cpu().contiguous()
    return (
        name,
        str(weight.dtype).removeprefix("torch."),
        tuple(weight.shape),
        (content.reshape(-1).view(torch.uint8).numpy().tobytes()),
    )


def unpack(packed: Sequence[Any]) -> tuple[str, Tensor]:
    """Rebuild the tensor that `pack` took apart."""
    import torch

    name, dtype, shape, content = packed
    weight = torch.empty(tuple(shape), dtype=getattr(torch, dtype))
    if content:
        weight.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return name, weight
