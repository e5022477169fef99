"""What the plugins cost a trivial test: the same thousand tests with every plugin of rlcanary and with none.

The promise is at most 1 ms a test while no Ray cluster runs. Both sessions have pytest-timeout's limit of 300 seconds and
take turns; the fastest of each counts, in processor time, which other work on the machine hardly changes. The time on the
clock is shown beside it.
"""

import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

TESTS = 1000
ROUNDS = 5
BUDGET_MS = 1.0
FILE = "import pytest\n\n@pytest.mark.parametrize('index', range({tests}))\ndef test_nothing(index):\n    pass\n"


class Seconds(NamedTuple):
    processor: float
    clock: float


def session(folder: Path, tests: int, *options: str) -> Seconds:
    """The time of one session with so many tests."""
    (folder / "test_many.py").write_text(FILE.format(tests=tests))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=300", *options]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Seconds(processor, time.perf_counter() - began)


def least(times: list[Seconds]) -> Seconds:
    return Seconds(*map(min, zip(*times, strict=True)))


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="rlcanary-overhead-") as name:
        folder = Path(name)
        (folder / "pytest.ini").touch()
        times: dict[tuple[str, int], list[Seconds]] = defaultdict(list)
        for _ in range(ROUNDS):
            for tests in (TESTS, 1):
                times["plain", tests].append(session(folder, tests, "-p", "no:rlcanary"))
                times["full", tests].append(session(folder, tests))
    best = {key: least(found) for key, found in times.items()}
    plain, full = (
        Seconds(
            *((many - one) / (TESTS - 1) * 1000 for many, one in zip(best[name, TESTS], best[name, 1], strict=True))
        )
        for name in ("plain", "full")
    )
    for kind in ("processor", "clock"):
        alone, together = getattr(plain, kind), getattr(full, kind)
        print(
            f"{kind + ' time of a trivial test:':34} {alone:.2f} ms with pytest alone, {together:.2f} ms with rlcanary "
            f"({together / alone:.2f} x)"
        )
    overhead = full.processor - plain.processor
    print(f"overhead per test: {overhead:.2f} ms of processor time (promised: at most {BUDGET_MS:g} ms)")
    per_session = best["full", 1].processor - best["plain", 1].processor
    print(f"overhead per session: {per_session:.2f} s of processor time")
    return int(overhead > BUDGET_MS)


if __name__ == "__main__":
    sys.exit(main())
