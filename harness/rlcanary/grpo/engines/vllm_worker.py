"""Load new weights into a running vLLM engine: the part in its workers, and the request from the engine's process.

`model.load_weights` is not enough: on CPUs the linear layers were packed when the engine started, and loading fails half-way
with the engine still answering. The model runner's `reload_weights` undoes and redoes the packing, and is on GPUs too.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcanary.grpo.engines.vllm_liveness import while_alive
from rlcanary.grpo.sync.sync import fingerprint
from rlcanary.grpo.sync.transports import BytesTransport, FileTransport, Packed

if TYPE_CHECKING:
    from torch import Tensor

# A request to the workers takes no tensors, and no objects of classes: packed weights, or the path of a safetensors file.
Parcel = list[Packed] | str
RECEIVE = "rlcanary_receive_weights"


class WeightReceiver:
    """Mixed into vLLM's workers (`worker_extension_cls`), whose `model_runner` it uses."""

    model_runner: Any

    def rlcanary_receive_weights(self, parcel: Parcel) -> dict[str, str]:
        """Load all parameters of the checkpoint anew -> the fingerprint of each tensor as it came out of the parcel."""
        reload = self.model_runner.reload_weights
        if "weights_iterator" not in inspect.signature(reload).parameters:
            raise RuntimeError(
                "this version of vLLM reloads weights from its own files only: weight sync needs 0.16 or later"
            )
        transport = FileTransport(Path()) if isinstance(parcel, str) else BytesTransport()
        weights = dict(transport.deliver(parcel))
        arrived = {name: fingerprint(weight) for name, weight in weights.items()}
        reload(weights_iterator=iter(weights.items()))
        return arrived


def receive(llm: Any, parcel: Parcel) -> dict[str, str]:
    """Have all workers of a `vllm.LLM` load a parcel -> the fingerprints of the loaded tensors.

    The parcel has to hold every parameter of `checkpoint_shapes` and no other: an unknown name ends the engine.

    Raises:
        RuntimeError: the workers cannot receive weights, or they did not all receive the same.
        Exception: a worker raised it; the engine may hold a mixture then.
    """
    if "WeightReceiver" not in str(llm.llm_engine.vllm_config.parallel_config.worker_extension_cls):
        raise RuntimeError(
            "this engine was started without worker_extension_cls="
            "'rlcanary.grpo.engines.vllm_worker.WeightReceiver', without which its workers cannot receive weights"
        )
    first, *others = while_alive(llm, lambda: llm.collective_rpc(RECEIVE, args=(parcel,)))
    if any(other != first for other in others):
        raise RuntimeError("the workers of the engine received different weights")
    return dict(first)


def load_into(llm: Any, weights: Mapping[str, Tensor]) -> None:
    """Load weights through the request itself, and compare the arrived tensors with the sent ones.

    Raises:
        RuntimeError: a tensor arrived differently; or as for `receive`.
    """
    with BytesTransport().send(list(weights.items())) as parcel:
        arrived = receive(llm, parcel)
    differing = sorted(name for name, weight in weights.items() if arrived.get(name) != fingerprint(weight))
    if differing:
        raise RuntimeError(f"{len(differing)} parameters are not as they were sent: {', '.join(differing[:3])}")


def checkpoint_shapes(llm: Any) -> dict[str, tuple[int, ...]]:
    """Read the parameters, by name, of the safetensors files that the engine was started from.

    Raises:
        RuntimeError: there is no such file in its model's folder.
    """
    from safetensors import safe_open

    folder = Path(llm.llm_engine.model_config.model)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                shapes[name] = tuple(file.get_slice(name).get_shape())
    if not shapes:
        raise RuntimeError(f"{folder} holds no .safetensors file: the engine's parameter names are unknown")
    return shapes
