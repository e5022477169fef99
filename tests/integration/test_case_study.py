"""The case study: what its page says of the published functions, and of a wrong group size, is what is found."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from readme_commands import EXAMPLES, commands

PAGE = (Path(__file__).parents[2] / "docs/case-study.md").read_text()
CLONE = os.environ.get("RLVR_EXPERIMENTS", "")


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the first table behind this text."""
    table = re.search(r"^\|.*?(?=^[^|])", PAGE.partition(heading)[2], re.MULTILINE | re.DOTALL)
    assert table, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def test_metrics_of_a_run_are_green_and_the_checks_red_where_the_group_size_is_wrong() -> None:
    example = runpy.run_path(str(EXAMPLES / "wrong_group_size/run.py"))
    rows = {row[0]: row[1:] for row in rows_of("## A wrong group size")}
    assert list(rows) == list(example["GROUPS"])
    _, *verdicts = example["judged"]("twice")
    assert verdicts == rows["twice"][1:]
    assert verdicts == ["5 of 5 pass", "advantages", ", ".join(example["CHECKED"])]
    assert rows["right"][1:] == ["5 of 5 pass", "no finding", "pass"]


def test_page_and_readme_of_the_published_functions_type_the_same_commands() -> None:
    readme = commands((EXAMPLES / "rlvr_experiments/README.md").read_text())
    assert [each for each in commands(PAGE) if each[0].startswith("rlcanary check")] == readme[1:]


@pytest.mark.nightly
@pytest.mark.skipif(not CLONE, reason="set RLVR_EXPERIMENTS to a clone of rlvr-experiments at commit c364be0")
@pytest.mark.parametrize(
    ("command", "headings"),
    [
        (0, ["## What the checks find"]),
        (1, ["DAPO has two more."]),
        (2, ["DAPO has two more."]),
    ],
)
def test_checks_find_in_the_published_functions_exactly_what_the_page_says(
    tmp_path: Path, command: int, headings: list[str]
) -> None:
    path = os.pathsep.join(each for each in (f"{CLONE}/src", os.environ.get("PYTHONPATH")) if each)
    typed, code = [each for each in commands(PAGE) if each[0].startswith("rlcanary check")][command]
    done = subprocess.run(
        [sys.executable, "-m", *typed.split(), f"--json={tmp_path / 'out.json'}"],
        cwd=EXAMPLES / "rlvr_experiments",
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    found = {each["id"]: each for each in json.loads((tmp_path / "out.json").read_text())["checks"]}
    failed = {name for name, each in found.items() if each["status"] == "fail"}
    rows = rows_of(headings[0])
    told = rows if command == 0 else [rows[command - 1]]
    assert failed == {name for row in told for name in re.findall(r"`(.+?)`", row[0])} & set(found)
