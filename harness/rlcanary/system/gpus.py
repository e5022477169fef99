"""Names and memory use of NVIDIA GPUs, read through NVML.

NVML is the library behind nvidia-smi. It needs no CUDA context and no torch.
"""

import ctypes
import os
from collections.abc import Mapping
from typing import Any

from rlcanary.errors import UserError

_NAME_BYTES = 96


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Gpus:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible, by index (in PCI order) or by UUID."""

    def __init__(self, library: Any, environment: Mapping[str, str]) -> None:
        self._library = library
        self._devices = self._visible_devices(environment.get("CUDA_VISIBLE_DEVICES"))

    def __len__(self) -> int:
        return len(self._devices)

    def names(self) -> list[str]:
        """The distinct model names, sorted, such as `NVIDIA H100 80GB HBM3`."""
        found = set()
        for device in self._devices:
            buffer = ctypes.create_string_buffer(_NAME_BYTES)
            self._call("nvmlDeviceGetName", device, buffer, ctypes.c_uint(_NAME_BYTES))
            found.add(buffer.value.decode())
        return sorted(found)

    def highest_used_bytes(self) -> int:
        """Memory in use on the fullest GPU, by all processes."""
        highest = 0
        for device in self._devices:
            memory = _Memory()
            self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
            highest = max(highest, int(memory.used))
        return highest

    def _visible_devices(self, visible: str | None) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        names = (
            [str(index) for index in range(count.value)]
            if visible is None
            else [name.strip() for name in visible.split(",") if name.strip()]
        )
        devices = []
        for name in names:
            device = ctypes.c_void_p()
            if name.lstrip("-").isdigit():
                if not 0 <= int(name) < count.value:
                    break  # CUDA hides everything from the first invalid index on
                self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(name)), ctypes.byref(device))
            else:
                self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(device))
            devices.append(device)
        return devices

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise UserError(
                f"the NVIDIA driver answered {function} with error {status}; check nvidia-smi and CUDA_VISIBLE_DEVICES"
            )


def open_gpus(environment: Mapping[str, str] = os.environ) -> Gpus | None:
    """Open the visible GPUs. Returns None without an NVIDIA driver or if every GPU is hidden."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if library.nvmlInit_v2() != 0:  # The library is installed, but the driver or the device is missing.
        return None
    gpus = Gpus(library, environment)
    return gpus if len(gpus) else None
