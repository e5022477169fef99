"""Names and memory use of NVIDIA GPUs, read through NVML, the library behind nvidia-smi. Needs no CUDA and no torch."""

import ctypes
import os
from collections.abc import Mapping
from typing import Any

from rlcanary.errors import UserError


class Gpus:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible, by index (in PCI order) or by UUID.

    Args:
        nvml: The module pynvml, initialised.
        environment: The environment variables.
    """

    def __init__(self, nvml: Any, environment: Mapping[str, str]) -> None:
        self._nvml = nvml
        self._devices = self._visible_devices(environment.get("CUDA_VISIBLE_DEVICES"))

    def __len__(self) -> int:
        return len(self._devices)

    def names(self) -> list[str]:
        """List the distinct model names, sorted, such as `NVIDIA H100 80GB HBM3`."""
        return sorted({self._ask("nvmlDeviceGetName", device) for device in self._devices})

    def highest_used_bytes(self) -> int:
        """Return the memory in use on the fullest GPU, by all processes."""
        return max((int(self._ask("nvmlDeviceGetMemoryInfo", device).used) for device in self._devices), default=0)

    def _visible_devices(self, visible: str | None) -> list[Any]:
        count = self._ask("nvmlDeviceGetCount")
        names = map(str, range(count)) if visible is None else filter(None, map(str.strip, visible.split(",")))
        devices = []
        for name in names:
            if not name.lstrip("-").isdigit():
                devices.append(self._ask("nvmlDeviceGetHandleByUUID", name))
            elif 0 <= int(name) < count:
                devices.append(self._ask("nvmlDeviceGetHandleByIndex", int(name)))
            else:
                break  # CUDA hides everything from the first invalid index on
        return devices

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError as error:
            raise UserError(
                f"the NVIDIA driver answered {function} with: {error}; check nvidia-smi and CUDA_VISIBLE_DEVICES"
            ) from None


def open_gpus(environment: Mapping[str, str] = os.environ) -> Gpus | None:
    """Open the visible GPUs. Returns None without an NVIDIA driver or if every GPU is hidden.

    Raises:
        UserError: There is a driver, and nvidia-ml-py is not installed.
    """
    try:
        if ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2() != 0:
            return None  # The library is installed, but the driver or the device is missing.
    except OSError:
        return None
    try:
        import pynvml
    except ImportError as error:
        raise UserError(f"this machine has an NVIDIA driver, and {error}: pip install nvidia-ml-py") from None
    pynvml.nvmlInit()
    gpus = Gpus(pynvml, environment)
    return gpus if len(gpus) else None
