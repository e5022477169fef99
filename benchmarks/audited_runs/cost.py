"""What the audit costs: CPU time and the memory of tensors, with it against without."""

import gc
import statistics
import time
from itertools import accumulate

import torch
from torch import Tensor

from audited_runs.training import PROFILES, Run
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.live import Audit


def cost(every: int, steps: int, size: tuple[int, int, int]) -> float:
    """Return the CPU time of steps with the audit over that without, the median of alternating blocks."""
    conventions, _ = PROFILES["GRPO"]
    runs = {
        name: Run(ReferenceAdapter(conventions), audit, size=size)
        for name, audit in (("with", Audit(conventions, every=every, on_finding="log")), ("without", None))
    }
    ratios = []
    for _ in range(3):
        seconds = {}
        for name, run in runs.items():
            began = time.process_time()
            for _ in range(steps):
                run.step()
            seconds[name] = time.process_time() - began
        ratios.append(seconds["with"] / seconds["without"])
    return statistics.median(ratios)


def memory(size: tuple[int, int, int]) -> tuple[float, int]:
    """Compare the memory of tensors in steps with and without the audit of each update.

    Returns:
        The peak with the audit over that without, and the bytes by which it holds more between steps.
    """
    conventions, _ = PROFILES["GRPO"]
    peaks, held = [], []
    for audit in (Audit(conventions, every=1, on_finding="log"), None):
        run = Run(ReferenceAdapter(conventions), audit, size=size)
        run.step()  # makes what the optimizer keeps
        resident = tensor_bytes()
        with torch.profiler.profile(profile_memory=True) as profiled:
            run.step()
        changes = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        added = list(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))
        peaks.append(resident + max(added))
        held.append(tensor_bytes() - resident)
        del run
    return peaks[0] / peaks[1], held[0] - held[1]


def tensor_bytes() -> int:
    """Count the bytes of all tensors that there are, each storage once."""
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if isinstance(each, Tensor)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())
