"""Sync weights: the engines hold exactly the trainer's weights, or the sync fails with the reason.

The checks follow bugs in released trainers: names and shapes that only one side has, weights that did not arrive as
they were sent, a prefix cache of the old weights, and a version that counts syncs which did not happen.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rlcanary.grpo.sync.transports import Transport

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())


class SyncError(Exception):
    """The engines do not hold the trainer's weights; their version has not moved."""


class Expected(NamedTuple):
    """A parameter of an engine, such as (64, 32) and "float32"."""

    shape: tuple[int, ...]
    dtype: str


class Endpoint(Protocol):
    """The part of an engine that weight sync uses.

    Attributes:
        version: number of completed weight syncs.
    """

    version: int

    def expected(self) -> Mapping[str, Expected]:
        """Return the parameters of the engine's model, by the trainer's names."""

    def receive(self, transport: Transport, parcel: Any) -> dict[str, str]:
        """Load the transport's delivery -> the fingerprint of each parameter as it was loaded."""

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of all prefixes."""


class InProcessEndpoint:
    """The endpoint of an engine in this process that has a torch `model`; that of another kind overrides two methods."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def version(self) -> int:
        return int(self.engine.version)

    @version.setter
    def version(self, version: int) -> None:
        self.engine.version = version

    def expected(self) -> Mapping[str, Expected]:
        return expected_of(self.engine.model)

    def receive(self, transport: Transport, parcel: Any) -> dict[str, str]:
        self.engine.load_weights(transport.deliver(parcel))
        return {name: fingerprint(parameter) for name, parameter in self.engine.model.named_parameters()}

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()


def sync_weights(
    model: Any,
    endpoints: Sequence[Endpoint],
    transport: Transport,
    *,
    attempts: int = 2,
) -> int:
    """Copy a model's weights into all engines, with its adapters merged.

    Names and shapes are compared before anything is sent. After the transport the fingerprints of the weights every engine
    loaded are compared with those of the sent ones; then the prefix caches are reset and the versions move, all to the
    same number. A try that fails is made again with all weights, which repairs an engine that was left half loaded.

    Args:
        model: the model in training.
        endpoints: endpoints of the engines, all at one version.
        transport: the way in which weights travel.
        attempts: tries per engine.

    Returns:
        The new version.

    Raises:
        SyncError: naming the parameters or the engine. No version has moved.
    """
    version = max(endpoint.version for endpoint in endpoints) + 1
    for index, endpoint in enumerate(endpoints):
        with _naming(index, endpoint, version):
            expected = endpoint.expected()
        weights = list(_covering(model, expected, index))
        with _naming(index, endpoint, version):
            _deliver(endpoint, transport, weights, attempts)
    for index, endpoint in enumerate(endpoints):
        with _naming(index, endpoint, version):
            endpoint.reset_prefix_cache()
    for index, endpoint in enumerate(endpoints):
        with _naming(index, endpoint, version):
            endpoint.version = version
    return version


@contextmanager
def _naming(index: int, endpoint: Endpoint, version: int) -> Iterator[None]:
    """Add the engine's name to any error that it or a transport raises."""
    try:
        yield
    except Exception as error:
        raise SyncError(
            f"engine {index} did not take the weights of version {version}; it stays at {endpoint.version} and may hold a "
            f"mixture: {type(error).__name__}: {error}"
        ) from error


def expected_of(model: Any) -> dict[str, Expected]:
    """Return the parameters of a torch model, each tied one once."""
    return {
        name: Expected(tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
        for name, parameter in model.named_parameters()
    }


def fingerprint(tensor: Tensor) -> str:
    """Compute a digest of dtype, shape and every bit."""
    import torch

    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _deliver(endpoint: Endpoint, transport: Transport, weights: list[tuple[str, Tensor]], attempts: int) -> None:
    sent = {name: fingerprint(weight) for name, weight in weights}
    for attempt in range(1, attempts + 1):
        try:
            with transport.send(weights) as parcel:
                loaded = endpoint.receive(transport, parcel)
            differing = sorted(name for name, value in sent.items() if loaded.get(name) != value)
            if differing:
                raise SyncError(f"{len(differing)} parameters are not as they were sent: {_some(differing)}")
        except Exception:
            if attempt == attempts:
                raise
            log.warning("weight sync failed, trying again with all weights", exc_info=True)
        else:
            return


def _covering(model: Any, expected: Mapping[str, Expected], index: int) -> Iterable[tuple[str, Tensor]]:
    """Cast the model's weights to the engine's dtypes, after checking that names and shapes fit."""
    import torch

    from rlcanary.grpo.lora import merged_weights

    parameters = merged_weights(model)
    missing, unknown = sorted(set(expected) - set(parameters)), sorted(set(parameters) - set(expected))
    if missing or unknown:
        raise SyncError(
            f"engine {index} and the trainer differ in their parameters: only the engine has {_some(missing)}, only the "
            f"trainer {_some(unknown)}"
        )
    for name, parameter in parameters.items():
        if tuple(parameter.shape) != expected[name].shape:
            raise SyncError(
                f"{name} is {tuple(parameter.shape)} in the trainer and {expected[name].shape} in engine {index}"
            )
    return [
        (name, parameter.detach().to(getattr(torch, expected[name].dtype))) for name, parameter in parameters.items()
    ]


def _some(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most]) or "none"
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
