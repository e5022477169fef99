"""Which GPUs count and how their memory is read, on a stand-in for the driver's library: test machines have no GPU."""

import ctypes
from dataclasses import dataclass
from typing import Any

import pytest

from rlcanary.errors import UserError
from rlcanary.recording.memory import BYTES_PER_GB, MemorySampler
from rlcanary.system.gpus import Gpus


@dataclass
class Gpu:
    name: str
    uuid: str
    used_gb: float


class FakeNvml:
    """Answers as libnvidia-ml does: status codes, results through pointers."""

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = gpus

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: Any) -> int:
        device._obj.value = index.value + 1  # a null handle would be None
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        positions = [position for position, gpu in enumerate(self.gpus, start=1) if gpu.uuid.encode() == uuid]
        if not positions:
            return 6  # NVML_ERROR_NOT_FOUND
        device._obj.value = positions[0]
        return 0

    def nvmlDeviceGetName(self, device: ctypes.c_void_p, buffer: Any, size: ctypes.c_uint) -> int:
        buffer.value = self.gpus[(device.value or 0) - 1].name.encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.used = int(self.gpus[(device.value or 0) - 1].used_gb * BYTES_PER_GB)
        return 0


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml(Gpu("NVIDIA H200", "GPU-a", 2.0), Gpu("NVIDIA H200", "GPU-b", 7.5), Gpu("NVIDIA L4", "GPU-c", 1.0))


@pytest.mark.parametrize(
    ("visible", "names", "highest_gb"),
    [
        (None, ["NVIDIA H200", "NVIDIA L4"], 7.5),
        ("0,2", ["NVIDIA H200", "NVIDIA L4"], 2.0),
        ("GPU-c", ["NVIDIA L4"], 1.0),
        ("2,9,1", ["NVIDIA L4"], 1.0),
        ("", [], 0.0),
    ],
    ids=["all", "by index", "by UUID", "nothing after an invalid index", "all hidden"],
)
def test_only_visible_gpus_count(nvml: FakeNvml, visible: str | None, names: list[str], highest_gb: float) -> None:
    gpus = Gpus(nvml, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert gpus.names() == names
    assert gpus.highest_used_bytes() == highest_gb * BYTES_PER_GB


def test_unknown_gpu_is_an_error_and_not_zero(nvml: FakeNvml) -> None:
    with pytest.raises(
        UserError, match="nvmlDeviceGetHandleByUUID with error 6; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    ):
        Gpus(nvml, {"CUDA_VISIBLE_DEVICES": "GPU-x"})


def test_maximum_on_a_gpu_outlasts_the_moment(nvml: FakeNvml) -> None:
    sampler = MemorySampler(Gpus(nvml, {}))
    assert sampler.max_gb() == 7.5
    nvml.gpus[1].used_gb = 0.5
    assert sampler.max_gb() == 7.5
