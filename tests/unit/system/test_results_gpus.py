"""Which GPUs count and how their memory is read, on a stand-in for the driver: test machines have no GPU."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from rlcanary.errors import UserError
from rlcanary.recording.memory import BYTES_PER_GB, MemorySampler
from rlcanary.system.gpus import Gpus, open_gpus


@dataclass
class Gpu:
    name: str
    uuid: str
    used_gb: float


class FakeNvml:
    """The part of the module pynvml that is used, without a driver."""

    class NVMLError(Exception): ...

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = gpus

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        found = [gpu for gpu in self.gpus if gpu.uuid == uuid]
        if not found:
            raise self.NVMLError("Not Found")
        return found[0]

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> SimpleNamespace:
        return SimpleNamespace(used=int(gpu.used_gb * BYTES_PER_GB))


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
        UserError, match="nvmlDeviceGetHandleByUUID with: Not Found; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    ):
        Gpus(nvml, {"CUDA_VISIBLE_DEVICES": "GPU-x"})


def test_driver_without_nvidia_ml_py_is_an_error_and_not_a_machine_without_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(nvmlInit_v2=lambda: 0))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UserError, match="pip install nvidia-ml-py"):
        open_gpus({})


def test_maximum_on_a_gpu_outlasts_the_moment(nvml: FakeNvml) -> None:
    sampler = MemorySampler(Gpus(nvml, {}))
    assert sampler.max_gb() == 7.5
    nvml.gpus[1].used_gb = 0.5
    assert sampler.max_gb() == 7.5
