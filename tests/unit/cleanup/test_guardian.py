"""The guardian of a pytest session."""

import subprocess
import time
from types import SimpleNamespace

import pytest

from rlcanary.cleanup import guardian


def test_look_that_had_to_wait_for_the_processor_does_not_put_the_next_one_off(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = subprocess.Popen(["sleep", "600"])
    rests: list[float] = []

    def slow(pid: int) -> dict[int, int]:
        time.sleep(0.1)  # no processor time
        return {}

    def rest(*wait: object) -> None:
        rests.append(float(str(wait[-1])))
        if len(rests) == 3:
            owner.kill()
            owner.wait()

    monkeypatch.setattr(guardian, "descendants", slow)
    monkeypatch.setattr(guardian, "select", SimpleNamespace(select=rest))
    started = guardian.start_time(owner.pid)
    assert started is not None
    guardian.guard("no such mark", owner.pid, started)
    assert rests == [guardian.LOOK_SECONDS] * 3
