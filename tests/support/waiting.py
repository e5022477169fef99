"""How long tests wait, in one place: no claim of a test rests on how fast the machine is."""

import time
from collections.abc import Callable

# A guard against hangs and nothing else: far above what anything takes on a machine with ten other busy processes.
HANG_S = 1200.0
# A limit that something has to run into: a hang costs this, and a command of milliseconds never takes as long.
QUICK_S = 4.0


def wait_for(condition: Callable[[], object]) -> None:
    """Return once the condition holds.

    Raises:
        AssertionError: it did not hold for HANG_S seconds.
    """
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
