import os
import subprocess
import sys

import psutil

from rlcanary.bisect.process import end_session


def sleeper(mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env=os.environ | {"MARK": mark}, start_new_session=True
    )


def test_session_whose_number_a_stranger_has_now_is_left_alone() -> None:
    stranger = sleeper("other")
    try:
        end_session(stranger.pid, {"MARK": "mine"})
        assert psutil.Process(stranger.pid).status() != psutil.STATUS_ZOMBIE
    finally:
        stranger.kill()
        stranger.wait()


def test_session_with_our_mark_is_ended() -> None:
    ours = sleeper("mine")
    end_session(ours.pid, {"MARK": "mine"})
    assert ours.wait(timeout=5) < 0
