"""What the audit costs: CPU time and the memory of tensors, with it against without."""

import gc
import time
from itertools import accumulate

import torch
from torch import Tensor

from audited_runs.training import PROFILES, Run
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.live import Audit


def cost(every: int, steps: int, size: tuple[int, int, int]) -> float:
    """Return the CPU time of all steps with the audit over that without, step by step in turns.

    The first of a pair changes, so that neither run has the warmer machine.
    """
    conventions, _ = PROFILES["GRPO"]
    runs = {
        name: Run(ReferenceAdapter(conventions), audit, size=size)
        for name, audit in (("with", Audit(conventions, every=every, on_finding="log")), ("without", None))
    }
    seconds = dict.fromkeys(runs, 0.0)
    for step in range(steps):
        for name in sorted(runs, reverse=step % 2 == 1):
            began = time.process_time()
            runs[name].step()
            seconds[name] += time.process_time() - began
    return seconds["with"] / seconds["without"]


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
