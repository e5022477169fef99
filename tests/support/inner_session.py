"""Runs pytest with every plugin of rlcanary on a file of tests, in a process of its own, and reads what it reported."""

import os
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from waiting import HANG_S

# Plugins of other packages that no test of ours is about: loading them takes 2.5 seconds of 3.4.
WITHOUT_FOREIGN = ("-p", "no:anyio", "-p", "no:hydra_pytest", "-p", "no:hypothesispytest")


RUNS_TWICE = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    for _ in range(2):  # as pytest-rerunfailures does
        item._initrequest()
        runtestprotocol(item, nextitem=nextitem)
    return True
"""
"""A `conftest.py` under which each test has two attempts."""


@dataclass
class Case:
    """One test's outcome: passed, failed, error or skipped; and the text of its report."""

    outcome: str
    text: str


@dataclass
class Run:
    code: int
    output: str
    cases: dict[str, Case]
    folder: Path


def run_session(folder: Path, tests: str, *options: str, **environment: str) -> Run:
    """Write `tests` as test_inner.py into the folder and run it."""
    (folder / "test_inner.py").write_text(textwrap.dedent(tests))
    (folder / "pytest.ini").touch()
    return run_pytest(folder, *options, **environment)


def run_pytest(folder: Path, *options: str, **environment: str) -> Run:
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *WITHOUT_FOREIGN, f"--junitxml={report}", *options]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "RAY_"))}
    done = subprocess.run(
        command,
        cwd=folder,
        env=inherited | {"COLUMNS": "200", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    return Run(done.returncode, done.stdout, read_cases(report), folder)


def read_cases(report: Path) -> dict[str, Case]:
    if not report.exists():
        return {}
    cases: dict[str, Case] = {}
    for element in ElementTree.parse(report).iter("testcase"):
        problems = [(child.tag, child) for child in element if child.tag in ("failure", "error", "skipped")]
        outcome = {"failure": "failed"}.get(problems[0][0], problems[0][0]) if problems else "passed"
        text = "\n".join(f"{child.get('message')}\n{child.text}" for _, child in problems)
        cases[element.get("name", "")] = Case(outcome, text)
    return cases
