"""Small repositories with test scripts to launch."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bisect_repositories import make_history
from waiting import HANG_S

SCRIPT = "tests/test_suites/llm/grpo-tiny.sh"
CHECK = 'rlcanary check-metrics "$JSON_METRICS" \'data["loss"]["1"] < 1\''


def script(
    body: str = "", *, runs: int = 1, gpus: int = 0, minutes: int = 2, nodes: int = 1, check: str = CHECK
) -> str:
    """A test script; the file `loss` of its commit is what it measures."""
    return (
        "#!/bin/bash\n# ===== BEGIN CONFIG =====\n"
        f"NUM_NODES={nodes}\nGPUS_PER_NODE={gpus}\nSTEPS_PER_RUN=1\nMAX_STEPS={runs}\n"
        "NUM_RUNS=$(( (MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN ))\n"
        f"NUM_MINUTES={minutes}\n# ===== END CONFIG =====\nset -eu\n"
        f'{body}\necho "{{\\"loss\\": {{\\"1\\": $(cat loss)}}}}" > "$JSON_METRICS"\n{check}\n'
    )


def make_project(folder: Path, loss: str = "0.5", **scripts: str) -> Path:
    """A repository of one commit with these scripts, by the names of their algorithms."""
    files = {f"tests/test_suites/llm/{name}.sh": text for name, text in scripts.items()}
    return make_history(folder, 1, lambda i: {"loss": f"{loss}\n", **files})


def launch(project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Typed in the project's root, waiting for the verdict unless WATCH says otherwise."""
    return typed(project, "launch", *arguments, **{"WATCH": "1"} | variables)


def typed(project: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command of rlcanary, in the project's root."""
    return subprocess.run(
        [sys.executable, "-m", "rlcanary", *command],
        cwd=project,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def outputs(project: Path) -> list[str]:
    """What the runs printed, oldest launch first."""
    return [file.read_text() for file in sorted(project.glob("launches/*/run*/output.log"))]


def fake_programs(folder: Path, programs: Mapping[str, str]) -> Path:
    """A folder for the PATH with programs of these texts, for faults that the real ones do not produce on demand."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def files_of(losses: Callable[[int], str], text: str, also: Sequence[str] = ()) -> Callable[[int], Mapping[str, str]]:
    def files(i: int) -> Mapping[str, str]:
        return {"loss": f"{losses(i)}\n", SCRIPT: text, **dict.fromkeys(also, "x\n")}

    return files
