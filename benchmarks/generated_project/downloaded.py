"""Edits of a downloaded project, with the tests that each concerns as found by running all tests, without a tracer.

The project is Mistune, from its source distribution on the package index: pure Python, 300 tests in a second, with plugins
that are imported by name, parsers shared by all tests of a file, and scanners that are compiled when first asked for. Two
sorts of edits:

- a function: a line is written at its beginning, which notes the test that runs it. All tests of a file run in a process of
  their own, each forked from it after collection, so that no test lives on what another filled. What runs while the file is
  collected is of all its tests. The exact set is the tests that ran the line: their code changed.
- a literal: a number or a text of a constant, a default, an expression of a module or a fixture file changes. The exact set
  is the tests with another outcome in a run of all; a tool rightly chooses more, as every reader may fail.
"""

import ast
import os
import random
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from generated_project.holes import Edit

PROJECT = "mistune==3.1.3"
TESTS = ("directives", "hooks", "misc", "plugins", "renderers")
OFF = ("no:testmon", "no:cacheprovider", "no:rlcanary")  # a thread of its timeouts does not survive a fork
PROBE = '__import__("probe").hit({number})'
PLUGIN = """
import os
import pytest
from _pytest.runner import runtestprotocol

seen = set()

def note(*words):
    with open(os.environ["NOTES"], "a") as stream:
        print(*words, file=stream)

def hit(number):
    if (number, os.environ["NOW"]) not in seen:
        seen.add((number, os.environ["NOW"]))
        note(number, os.environ["NOW"])

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if "FORK" not in os.environ:
        return None
    child = os.fork()
    if not child:
        os.environ["NOW"] = item.nodeid
        runtestprotocol(item, nextitem=nextitem, log=False)
        os._exit(0)
    os.waitpid(child, 0)
    return True

def pytest_runtest_logreport(report):
    if report.failed or report.when == "call":
        note(report.outcome, report.nodeid)
"""


def download(folder: Path) -> Path:
    """Get the project, without the tests that are left out."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        folder,
        PROJECT,
    ]
    subprocess.run(command, check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    archive.unlink()
    (project,) = (each for each in folder.iterdir() if each.is_dir())
    for file in project.glob("tests/test_*.py"):
        if file.stem.removeprefix("test_") not in TESTS:
            file.unlink()
    return project


def edits(project: Path, number: int, seed: int) -> Iterator[Edit]:
    """Yield random single edits, four of five of functions that tests run."""
    chance = random.Random(seed)
    files = sorted(path for part in ("src", "tests") for path in (project / part).rglob("*.py"))
    functions = [(path, line) for path in files for line in beginnings(path.read_text())]
    ran = by_probe(project, functions)
    literals = [(path, *change) for path in files for change in changes(path.read_text())]
    literals += [
        (path, "a fixture file", *text)
        for path in sorted(project.glob("tests/fixtures/*.txt"))
        for text in turned(path)
    ]
    few = number // 5
    for index in sorted(chance.sample(sorted(ran), min(number - few, len(ran)))):
        path, line = functions[index]
        before = path.read_text()
        yield Edit("a function", inside(project, path), before, with_probes(before, {line: "pass"}), ran[index])
    passed = outcomes(project)
    for path, what, before, after in chance.sample(literals, few):
        path.write_text(after)
        try:
            now = outcomes(project)
        finally:
            path.write_text(before)
        exact = {test for test, outcome in passed.items() if now.get(test) != outcome}
        yield Edit(what, inside(project, path), before, after, exact)


def inside(project: Path, path: Path) -> str:
    return path.relative_to(project).as_posix()


def beginnings(text: str) -> Iterator[tuple[int, int]]:
    """Yield the line and the column of the first statement of each function, after its docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body and body[0].lineno > node.lineno:
                yield body[0].lineno, body[0].col_offset


def with_probes(text: str, probes: dict[tuple[int, int], str]) -> str:
    lines = text.splitlines(keepends=True)
    for (line, column), statement in sorted(probes.items(), reverse=True):
        lines.insert(line - 1, f"{' ' * column}{statement}\n")
    return "".join(lines)


def by_probe(project: Path, functions: list[tuple[Path, tuple[int, int]]]) -> dict[int, set[str]]:
    """Run all tests with a probe in every function; return the tests that ran each, by its number."""
    by_file: defaultdict[Path, dict[tuple[int, int], str]] = defaultdict(dict)
    for number, (path, line) in enumerate(functions):
        by_file[path][line] = PROBE.format(number=number)
    before = {path: path.read_text() for path in by_file}
    for path, probes in by_file.items():
        path.write_text(with_probes(before[path], probes))
    ran: defaultdict[int, set[str]] = defaultdict(set)
    try:
        tests = list(outcomes(project))
        for file in sorted({test.partition("::")[0] for test in tests}):
            for number, test in run(project, file, FORK="1", NOW=file):
                every = [each for each in tests if each.startswith(f"{file}::")] if test == file else [test]
                ran[int(number)].update(every)
    finally:
        for path, text in before.items():
            path.write_text(text)
    return dict(ran)


def outcomes(project: Path) -> dict[str, str]:
    return {test: outcome for outcome, test in run(project, "tests", NOW="") if not outcome.isdigit()}


def run(project: Path, *arguments: str, **more: str) -> list[list[str]]:
    """Run tests, and return what the plugin noted."""
    notes = project.parent / "notes.txt"
    notes.write_text("")
    (project.parent / "probe.py").write_text(PLUGIN)
    options = [option for plugin in OFF for option in ("-p", plugin)]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "probe", "--continue-on-collection-errors", *options, *arguments],
        cwd=project,
        env={
            **os.environ,
            "PYTHONPATH": str(project.parent),
            "NOTES": str(notes),
            "PYTHONDONTWRITEBYTECODE": "1",
            **more,
        },
        capture_output=True,
        check=False,
    )
    return [line.split(" ", 1) for line in notes.read_text().splitlines() if line]


def changes(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the kind of place, the text and the text with another literal, for literals that are read while importing."""
    lines = text.splitlines(keepends=True)
    for what, node in literals(ast.parse(text)):
        new = changed(node.value)
        if new is not None and node.lineno == node.end_lineno:
            line = lines[node.lineno - 1].encode()
            edited = line[: node.col_offset] + new.encode() + line[node.end_col_offset :]
            yield what, text, "".join([*lines[: node.lineno - 1], edited.decode(), *lines[node.lineno :]])


def changed(value: object) -> str | None:
    match value:
        case bool():
            return repr(not value)
        case int():
            return repr(value + 1)
        case str() if value:
            return repr(value + "~")
    return None


def literals(tree: ast.Module) -> Iterator[tuple[str, ast.Constant]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if isinstance(default, ast.Constant):
                    yield "a default", default
        elif isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                    simple = isinstance(statement.value, ast.Constant)
                    where = "a constant" if simple else "an expression of a module"
                    yield from ((where, each) for each in ast.walk(statement.value) if isinstance(each, ast.Constant))


def turned(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the text of a fixture file, and the text with another expected output."""
    text = path.read_text()
    if "</p>" in text:
        yield text, text.replace("</p>", "</div>", 1)
