"""The page on tasks, rewards and rollouts: its example runs, its tables are those of the code."""

import re
from pathlib import Path
from typing import get_args

from rlcanary.grpo.data.items import Status
from rlcanary.grpo.rewards.by_name import VERIFIERS
from rlcanary.grpo.rewards.ifeval import CONSTRAINTS
from rlcanary.grpo.rewards.verifier import Problem
from rlcanary.grpo.rollout.buffer import FATES

TRAINER = (Path(__file__).parents[4] / "docs" / "grpo.md").read_text()
PAGE = TRAINER.partition("## Tasks, rewards")[2].partition("## Policies")[0]


def test_example_runs(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(code, "grpo.md", "exec"), {})
    assert "{'pending': 30, 'in flight': 0, 'done': 10, 'failed': 0}" in capsys.readouterr().out


def test_tables_are_those_of_the_code():
    first_column = set(re.findall(r"^\| `([a-z0-9]+)` \|", PAGE, re.MULTILINE))
    assert set(VERIFIERS) <= first_column
    for problem in get_args(Problem):
        assert f"`{problem}`" in PAGE
    for status in get_args(Status):
        assert f"| {status} |" in PAGE
    books = PAGE.rpartition("entered = ")[2].replace("\n", " ")
    assert books.strip().rstrip(".").split(" + ") == [*FATES, "waiting"]
    assert f"{len(CONSTRAINTS)} constraints" in PAGE
