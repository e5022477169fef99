"""Gates and known issues in real runs, and the scripts that teams call."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from inner_session import Run, run_pytest, run_session

SCRIPTS = Path(__file__).parents[2]
PROJECT = """
[tool.pytest.ini_options]
addopts = "--strict-markers -p no:rlcanary-tracker"

[tool.rlcanary.gates.mcore]
kind = "only"
description = "needs Megatron"

[tool.rlcanary.gates.automodel]
kind = "only"
module = "no_such_module"
install = "uv sync --extra automodel"
"""
GATED = """
import pytest

order = []

def test_plain():
    assert order == ["first"]

@pytest.mark.hf_gated
def test_gated(): pass

@pytest.mark.mcore
def test_mcore(): pass

@pytest.mark.mcore
@pytest.mark.hf_gated
def test_mcore_gated(): pass

@pytest.mark.gpus(64)
def test_many_gpus(): pass

@pytest.mark.run_first
def test_first():
    order.append("first")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "test_inner.py").write_text(GATED)
    return tmp_path


def passed(run: Run) -> set[str]:
    return {name.removeprefix("test_") for name, case in run.cases.items() if case.outcome == "passed"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"plain", "first"}),
        (["--hf-gated"], {"plain", "first", "gated"}),
        (["--mcore-only"], {"mcore"}),
        (["--mcore-only", "--hf-gated", "-m", "not run_first"], {"mcore", "mcore_gated"}),
    ],
)
def test_flags_choose_the_tests_whatever_the_mark_expression_says(
    project: Path, options: list[str], expected: set[str]
) -> None:
    run = run_pytest(project, *options)
    assert passed(run) == expected, run.output
    if "-m" not in options:
        held = {name.removeprefix("test_") for name, case in run.cases.items() if case.outcome == "skipped"}
        assert held == {"plain", "gated", "mcore", "mcore_gated", "many_gpus", "first"} - expected
        assert "needs 64 GPUs" in run.cases["test_many_gpus"].text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mcore-only", "--automodel-only"], "-only exclude each other"),
        (["--automodel-only"], "install it with `uv sync"),
    ],
)
def test_flags_that_cannot_work_are_refused(project: Path, options: list[str], message: str) -> None:
    run = run_pytest(project, *options)
    assert run.code == 4
    assert message in run.output


def test_flag_and_mark_of_a_project_of_the_same_name_stay_the_projects(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--hf-gated', action='store_true')\n"
        "def pytest_configure(config): config.addinivalue_line('markers', 'hf_gated: ours')\n"
    )
    run = run_session(
        tmp_path, "import pytest\n@pytest.mark.hf_gated\ndef test_one(): pass", "-p", "no:rlcanary-tracker"
    )
    assert run.cases["test_one"].outcome == "passed"


OWN_NIGHTLY = """
def pytest_addoption(parser):
    parser.addoption("--nightly", action="store_true", dest="run_nightly")
"""
NIGHTLY = "import pytest\n@pytest.mark.nightly\ndef test_one(): pass"
DECLARED = '[tool.rlcanary.gates.nightly]\nkind = "include"'


@pytest.mark.parametrize(
    ("declaration", "options", "outcome"),
    [("", [], "passed"), ("", ["--nightly"], "passed"), (DECLARED, [], "skipped"), (DECLARED, ["--nightly"], "passed")],
)
def test_flag_of_a_project_is_gated_where_it_is_declared_alone(
    tmp_path: Path, declaration: str, options: list[str], outcome: str
) -> None:
    (tmp_path / "conftest.py").write_text(OWN_NIGHTLY)
    (tmp_path / "pyproject.toml").write_text(declaration)
    run = run_session(tmp_path, NIGHTLY, "-p", "no:rlcanary-tracker", "--strict-markers", *options)
    assert run.cases["test_one"].outcome == outcome


def test_gates_command_says_which_test_is_held_back_by_what(project: Path) -> None:
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "140"}
    done = subprocess.run(
        [sys.executable, "-m", "rlcanary", "gates", "--hf-gated"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "3 of 6 tests are held back" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "test_many_gpus" in line]
    assert "gpus" in line
    assert "needs 64 GPUs" in line


KNOWN = """
import pytest

def test_fails_as_known():
    assert False

def test_is_fixed():
    pass

@pytest.mark.known_issue("STRICT")
def test_is_fixed_and_strict():
    pass

@pytest.mark.known_issue("OVER")
def test_fails_although_it_should_not():
    assert False

def test_is_skipped():
    pytest.skip("no engine")
"""
REGISTRY = """
[[issue]]
id = "OPEN"
tests = ["test_inner.py::test_fails_as_known", "test_inner.py::test_is_*", "test_inner.py::test_was_renamed"]
reason = "bundles"

[[issue]]
id = "STRICT"
reason = "parser"
strict = true

[[issue]]
id = "OVER"
reason = "old vLLM"
versions = ["pytest<8"]
"""


def test_known_issues_turn_failures_into_expected_ones_and_say_when_they_are_over(tmp_path: Path) -> None:
    (tmp_path / "known_issues.toml").write_text(REGISTRY)
    run = run_session(tmp_path, KNOWN, "-p", "no:rlcanary-tracker", "-rx", "-n", "1")
    assert "1 failed, 1 skipped, 1 xfailed, 2 xpassed, 1 error" in run.output
    assert "[XPASS(strict)] STRICT" in run.output
    over = run.output.partition("known issues to remove")[2]
    assert "test_is_fixed passes" in over
    assert "test_is_fixed_and_strict passes" in over
    assert run.cases["test_fails_although_it_should_not"].outcome == "failed"
    alone = run_pytest(tmp_path, "-p", "no:rlcanary-tracker").output.partition("known issues to remove")[2]
    assert "::test_was_renamed; remove it" in alone
    assert "not apply here: needs pytest<8" in alone


BOUND = """
import pytest

@pytest.mark.known_issue("BOUND")
def test_known_error():
    {}["bundles"]

@pytest.mark.known_issue("BOUND")
def test_another_error():
    assert 1 == 2

@pytest.mark.known_issue("ENDED")
def test_after_the_last_day():
    {}["bundles"]
"""
BOUND_REGISTRY = """
[[issue]]
id = "BOUND"
reason = "bundles"
error = "KeyError: .bundles"

[[issue]]
id = "ENDED"
reason = "bundles"
until = 2025-12-31
"""


def test_known_issue_is_bound_to_its_error_and_its_last_day(tmp_path: Path) -> None:
    (tmp_path / "known_issues.toml").write_text(BOUND_REGISTRY)
    run = run_session(tmp_path, BOUND, "-p", "no:rlcanary-tracker")
    assert "2 failed, 1 xfailed" in run.output
    assert {name: case.outcome for name, case in run.cases.items()} == {
        "test_known_error": "skipped",
        "test_another_error": "failed",
        "test_after_the_last_day": "failed",
    }
    assert "BOUND" in run.output
    assert "ended on 2025-12-31" in run.output


FAILING_TEAR_DOWN = """
import pytest

@pytest.fixture
def engine():
    yield
    raise RuntimeError("does not end")

def test_tear_down(engine):
    pass

def test_strict_tear_down(engine):
    pass

def test_passes():
    pass
"""
TEAR_DOWN_REGISTRY = """
[[issue]]
id = "OPEN"
tests = ["test_inner.py::test_tear_down"]
reason = "end"

[[issue]]
id = "STRICT"
tests = ["test_inner.py::test_strict*"]
reason = "end"
strict = true
"""


@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_known_issue_that_shows_in_the_tear_down_is_not_called_fixed(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "known_issues.toml").write_text(TEAR_DOWN_REGISTRY)
    run = run_session(tmp_path, FAILING_TEAR_DOWN, "-p", "no:rlcanary-tracker", *options)
    assert run.code == 0, run.output
    assert "fixed?" not in run.output
    assert "2 xfailed" in run.output


@pytest.mark.parametrize("content", [b"issue = 3", "reason = '\u00df'".encode("latin-1")])
def test_broken_registry_is_one_line_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "known_issues.toml").write_bytes(content)
    run = run_session(tmp_path, "def test_one(): pass")
    assert run.code == 4
    (line,) = run.output.strip().splitlines()
    assert line.startswith("ERROR: ")
    assert "known_issues.toml" in line


def test_run_that_skipped_every_test_says_so(tmp_path: Path) -> None:
    tests = "import pytest\n@pytest.mark.nightly\ndef test_one(): pass\n@pytest.mark.gpus(64)\ndef test_two(): pass\n"
    assert "all 2 tests were skipped" in run_session(tmp_path, tests, "-p", "no:rlcanary-tracker").output


def test_mark_of_an_unknown_issue_is_refused(tmp_path: Path) -> None:
    run = run_session(tmp_path, "import pytest\n@pytest.mark.known_issue('NO')\ndef test_one(): pass")
    assert run.code == 2
    assert "no known_issues.toml" in run.output


@pytest.fixture
def scripts(project: Path) -> Path:
    """A project with the scripts, and a `docker` that records how it was called."""
    (project / "tests" / "unit").mkdir(parents=True)
    (project / "test_inner.py").rename(project / "tests" / "unit" / "test_inner.py")
    for name in ("run_unit.sh", "run_unit_in_docker.sh", "run_functional_in_docker.sh"):
        (project / "tests" / name).write_bytes((SCRIPTS / name).read_bytes())
        (project / "tests" / name).chmod(0o755)
    (project / "bin").mkdir()
    (project / "bin" / "docker").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {project}/called\n')
    (project / "bin" / "docker").chmod(0o755)
    return project


def run_script(folder: Path, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", f"tests/{script}", *arguments],
        cwd=folder,
        env=os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.mark.parametrize(
    ("flags", "summary"),
    [
        ([], "2 passed, 4 skipped"),
        (["--hf-gated"], "3 passed, 3 skipped"),
        (["--mcore-only"], "1 passed, 5 skipped"),
        (["--mcore-only", "--hf-gated"], "2 passed, 4 skipped"),
    ],
)
def test_run_unit_passes_flags_on(scripts: Path, flags: list[str], summary: str) -> None:
    done = run_script(scripts, "run_unit.sh", *flags)
    assert done.returncode == 0
    assert summary in done.stdout


def test_run_unit_counts_no_tests_as_success_and_failures_as_failures(scripts: Path) -> None:
    assert run_script(scripts, "run_unit.sh", "-k", "no_such_test").returncode == 0
    (scripts / "tests" / "unit" / "test_inner.py").write_text("def test_fails(): assert False")
    assert run_script(scripts, "run_unit.sh").returncode == 1


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"GPUS_REQUIRED": "64"}, "64 GPUs are required"),
        ({"GPUS_REQUIRED": "two"}, "GPUS_REQUIRED must be"),
        ({"PYTHON": "/bin/false"}, "/bin/false has no pytest"),
    ],
)
def test_run_unit_checks_the_machine_first(scripts: Path, environment: dict[str, str], message: str) -> None:
    done = run_script(scripts, "run_unit.sh", **environment)
    assert done.returncode == 2
    assert message in done.stderr


def test_docker_runs_the_same_in_the_container(scripts: Path) -> None:
    token = {"HF_TOKEN": "secret", "MOUNTS": "/data:/data,/cache:/cache", "GPUS": "2", "VIRTUAL_ENV": ""}
    done = run_script(
        scripts, "run_unit_in_docker.sh", "--mcore-only", "-k", "a and b", CONTAINER="my/image:1", **token
    )
    assert done.returncode == 0, done.stderr
    called = (scripts / "called").read_text().splitlines()
    assert called[:2] == ["run", "--rm"]
    assert called[called.index("my/image:1") :] == [
        "my/image:1",
        "bash",
        "tests/run_unit.sh",
        "--mcore-only",
        "-k",
        "a and b",
    ]
    options = " ".join(called[: called.index("my/image:1")])
    for expected in (
        f"--volume {scripts}:{scripts}",
        "--volume /data:/data",
        "--volume /cache:/cache",
        "--env HF_TOKEN",
        "--gpus 2",
    ):
        assert expected in options
    assert "secret" not in options  # others can read a command line


def test_daemon_that_is_down_is_the_fault_of_the_machine_and_of_no_commit(scripts: Path) -> None:
    (scripts / "bin" / "docker").write_text("#!/bin/sh\nexit 125\n")
    done = run_script(scripts, "run_unit_in_docker.sh", CONTAINER="image")
    assert (done.returncode, "daemon does not answer" in done.stderr) == (137, True)


def test_docker_runs_a_functional_test(scripts: Path) -> None:
    (scripts / "tests" / "functional").mkdir()
    (scripts / "tests" / "functional" / "sft.sh").touch()
    for name in ("functional/sft.sh", "tests/functional/sft.sh"):
        assert run_script(scripts, "run_functional_in_docker.sh", name, "steps=2", CONTAINER="image").returncode == 0
        called = (scripts / "called").read_text().splitlines()
        assert called[called.index("image") :] == ["image", "bash", "tests/functional/sft.sh", "steps=2"]


@pytest.mark.parametrize(
    ("script", "arguments", "environment", "message"),
    [
        ("run_unit_in_docker.sh", [], {}, "set CONTAINER"),
        ("run_functional_in_docker.sh", [], {"CONTAINER": "image"}, "name the script"),
        ("run_functional_in_docker.sh", ["no.sh"], {"CONTAINER": "image"}, "neither no.sh nor tests/no.sh"),
    ],
)
def test_docker_scripts_refuse_what_is_missing(
    scripts: Path, script: str, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    done = run_script(scripts, script, *arguments, **environment)
    assert done.returncode == 2
    assert message in done.stderr
