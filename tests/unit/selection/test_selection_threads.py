"""Threads that begin work at the same moment are all recorded."""

import json
import subprocess
import sys
from pathlib import Path

from waiting import HANG_S

# Setting a hook takes as long as the audit hooks: this one makes sure that the threads meet there.
PROGRAM = """
import sys, threading, time
from rlcanary.selection.injected.rlcanary_recorder import process

recorder = process.start(sys.argv[1], sys.argv[2], "t::1", may_trace=sys.argv[3] == "tracer")
recorder.begin("t::1")
sys.addaudithook(lambda event, _: time.sleep(0.01) if event in ("sys.settrace", "sys.setprofile") else None)
started = threading.Barrier(4)

def work():
    started.wait()
    for _ in range(3):
        recorder.begin("t::1")
        with recorder.backend.resting_here():
            pass
        recorder.end("t::1")

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_begin_work_at_once_are_not_lost_from_sight(tmp_path: Path) -> None:
    for backend in ("tracer", "profile"):
        folder = tmp_path / backend
        folder.mkdir()
        command = [sys.executable, "-c", PROGRAM, folder, tmp_path, backend]
        run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S)
        assert run.stderr == ""
        records = [json.loads(line) for path in folder.glob("*.journal") for line in path.read_text().splitlines()]
        assert [fields for fields in (record.get("fields") for record in records) if fields and fields[0] == "a"] == []
