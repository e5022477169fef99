"""Read a test script's configuration block, compute its cost, and read lists of scripts."""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from rlcanary.errors import UserError
from rlcanary.jobs.job import Resources

BLOCK = re.compile(r"^# =+ BEGIN CONFIG =+\n(.*?)^# =+ END CONFIG =+$", re.MULTILINE | re.DOTALL)
NAMES = ("NUM_NODES", "GPUS_PER_NODE", "STEPS_PER_RUN", "MAX_STEPS", "NUM_RUNS", "NUM_MINUTES")
LEAST = {"GPUS_PER_NODE": 0}
"""The least value of each number. The default is 1."""


@dataclass(frozen=True)
class Configuration:
    nodes: int
    gpus_per_node: int
    steps_per_run: int
    max_steps: int
    runs: int
    minutes: int
    """The time limit of each run."""

    @property
    def gpu_hours(self) -> Fraction:
        return self.node_hours * self.gpus_per_node

    @property
    def node_hours(self) -> Fraction:
        return Fraction(self.nodes * self.runs * self.minutes, 60)

    @property
    def resources(self) -> Resources:
        return Resources(self.nodes, self.gpus_per_node, self.minutes)


@dataclass(frozen=True)
class Line:
    script: Path
    """The script's path, relative to the list's folder."""
    reason: str
    """The comment after `#`, or an empty string."""


def read_list(file: Path) -> list[Line]:
    """Read a list with one script per line.

    Raises:
        UserError: The list cannot be read.
    """
    try:
        lines = [line.partition("#") for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from None
    return [Line(Path(script.strip()), reason.strip()) for script, _, reason in lines if script.strip()]


DISABLED = "disabled.txt"
"""The list, beside the others, of scripts that these leave out."""


def expand_lists(paths: Sequence[Path], leave_out: Callable[[Path, str], None]) -> list[Path]:
    """Replace each `.txt` list by its scripts, without those that the `disabled.txt` beside it names.

    Args:
        paths: Scripts and lists. A script that is named itself is taken, disabled or not.
        leave_out: Called with each script that is left out, and the reason in `disabled.txt`.

    Raises:
        UserError: A list is empty, or a script is listed twice.
    """
    scripts: list[Path] = []
    for path in paths:
        if path.suffix != ".txt":
            scripts.append(path)
            continue
        listed = [path.parent / line.script for line in read_list(path)]
        if not listed:
            raise UserError(f"{path} lists no script")
        disabled = {} if path.name == DISABLED else _disabled_beside(path)
        for script in listed:
            if script.resolve() in disabled:
                leave_out(script, disabled[script.resolve()])
            else:
                scripts.append(script)
    twice = [str(script) for script, count in Counter(script.resolve() for script in scripts).items() if count > 1]
    if twice:
        raise UserError(f"{', '.join(twice)}: named twice, and launched once: leave one out")
    if not scripts:
        raise UserError(f"every script is disabled by {DISABLED}: name one itself to launch it")
    return scripts


def _disabled_beside(path: Path) -> dict[Path, str]:
    """Read the reasons of the scripts in the `disabled.txt` beside a list."""
    file = path.parent / DISABLED
    lines = read_list(file) if file.is_file() else []
    return {(path.parent / line.script).resolve(): line.reason for line in lines}


def read_configuration(script: Path) -> Configuration:
    """Read the block between `# ===== BEGIN CONFIG =====` and `# ===== END CONFIG =====`.

    bash evaluates it, so it may calculate (`NUM_RUNS=$(( … ))`). The environment is empty, so that nothing comes from
    the caller's variables or from another script.

    Raises:
        UserError: The block is missing or not valid.
    """
    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {script}: {error}") from None
    blocks = BLOCK.findall(text)
    if len(blocks) != 1:
        raise UserError(
            f"{script} has {len(blocks)} configuration blocks: put {', '.join(NAMES)} once between the lines "
            "`# ===== BEGIN CONFIG =====` and `# ===== END CONFIG =====`"
        )
    printing = "".join(f'printf "%s\\n" "{name}=${{{name}-}}"\n' for name in NAMES)
    finished = subprocess.run(
        ["bash", "-euc", f"{blocks[0]}\n{printing}"],
        env={"PATH": os.defpath},
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode or finished.stderr:  # bash goes on after an invalid calculation.
        said = finished.stderr.strip().splitlines() or [f"exit code {finished.returncode}"]
        raise UserError(f"the configuration block of {script} does not run: {said[-1]}")
    values = dict(line.partition("=")[::2] for line in finished.stdout.splitlines()[-len(NAMES) :])
    if values.keys() != set(NAMES):
        told = "it has to reach its end, and each value to be on one line"
        raise UserError(f"the configuration block of {script} does not set {', '.join(NAMES)}: {told}")
    numbers = [_number(script, name, values[name]) for name in NAMES]
    return Configuration(*numbers)


def _number(script: Path, name: str, text: str) -> int:
    least = LEAST.get(name, 1)
    if not re.fullmatch(r"\d+", text) or int(text) < least:
        raise UserError(f"{script}: {name} is {text or 'missing'!r}: it has to be a whole number of at least {least}")
    return int(text)
