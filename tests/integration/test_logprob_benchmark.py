"""The logprob benchmark runs and writes its figures; its promises are checked on the full shapes, not here."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "logprobs.py"


def test_a_quick_run_measures_time_memory_and_error(tmp_path):
    report = tmp_path / "logprobs.json"
    choice = ["--case", "logits", "--dtype", "bfloat16", "--peer", "plain"]
    command = [sys.executable, str(SCRIPT), "--quick", *choice, "--json", str(report)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Logits to logprobs, forward, bfloat16" in shown
    (result,) = json.loads(report.read_text())["results"]
    ours, plain = result["rows"]
    assert (ours["implementation"], plain["implementation"]) == ("rlcanary", "plain")
    assert ours["seconds"] > 0
    assert ours["peak_mib"] >= 0
    assert plain["time_ratio"] == 1
    assert ours["error"] < 1e-5 < plain["error"]


def test_a_gpu_that_is_not_there_is_one_line(tmp_path):
    command = [sys.executable, str(SCRIPT), "--quick", "--device", "cuda"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env={"CUDA_VISIBLE_DEVICES": ""})
    assert finished.returncode == 2
    assert finished.stderr.splitlines()[-1].endswith("torch sees no GPU here")
