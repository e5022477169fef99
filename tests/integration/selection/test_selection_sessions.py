"""How sessions with --testmon behave: interrupted, damaged, in several processes, recorded by something else."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner
from selection_session import clean_environment, edited, run_testmon, selected, write_project
from waiting import wait_for

from rlcanary.commands.testing.selection import selection
from rlcanary.errors import UserError

MODULE = "def used(x):\n    return x\n\n\ndef other(x):\n    return x\n"


def outcomes(output: str) -> str:
    """The last line's counts, such as `2 passed`."""
    return output.strip().splitlines()[-1].strip("= ").partition(" in ")[0]


def test_stopping_at_the_first_failure_keeps_what_was_recorded(tmp_path: Path) -> None:
    test = "def test_one(): pass\n\n\ndef test_two(): assert {}\n\n\ndef test_three(): pass\n"
    project = write_project(tmp_path, {"test_it.py": test.format(0)})
    assert outcomes(run_testmon(project, "-x").stdout) == "1 failed, 1 passed"
    assert outcomes(run_testmon(project).stdout) == "1 failed, 1 passed, 1 deselected"
    (project / "test_it.py").write_text(test.format(1))
    assert outcomes(run_testmon(project).stdout) == "1 passed, 2 deselected"


@pytest.mark.parametrize("end", ["os._exit(1)", "os.kill(os.getpid(), 9)"])
def test_a_crash_keeps_what_was_recorded(tmp_path: Path, end: str) -> None:
    project = write_project(
        tmp_path, {"test_it.py": f"import os\n\n\ndef test_one(): pass\n\n\ndef test_two(): {end}\n", "data.json": "{}"}
    )
    assert run_testmon(project).returncode != 0
    run = run_testmon(project, "--collect-only", "-q")
    assert "test_two" in run.stdout
    assert "test_one" not in run.stdout


def test_records_that_came_after_a_run_was_killed_are_not_lost(tmp_path: Path) -> None:
    project = write_project(
        tmp_path,
        {
            "module.py": MODULE,
            "late.py": "import pathlib, time\npathlib.Path('started').touch()\n"
            "while not pathlib.Path('killed').exists(): time.sleep(0.01)\n"
            "from module import used\nused(1)\npathlib.Path('done').touch()\n",
            "test_it.py": "import os, pathlib, subprocess, sys, time\ndef test_one():\n"
            "    subprocess.Popen([sys.executable, 'late.py'])\n"
            "    while not pathlib.Path('started').exists(): time.sleep(0.01)\n"
            "def test_two(): pass\ndef test_three(): os.kill(os.getpid(), 9)\n",
        },
    )
    assert run_testmon(project, "-p", "no:rlcanary-cleanup").returncode == -9
    (project / "killed").touch()
    wait_for((project / "done").exists)
    run = run_testmon(project, "--collect-only")
    assert "incomplete records run again: 1" in run.stdout
    assert "test_one" in run.stdout
    assert "test_two" not in run.stdout


def test_options_that_choose_tests_mean_what_they_mean_to_testmon(tmp_path: Path) -> None:
    test = "from module import used\ndef test_{0}(): used(1)\ndef test_{0}_else(): pass\n"
    project = write_project(
        tmp_path, {"module.py": MODULE, "test_a.py": test.format("a"), "test_b.py": test.format("b")}
    )
    run_testmon(project)
    (project / "module.py").write_text(MODULE.replace("return x", "return x + 0", 1))
    assert "2/4 tests collected" in run_testmon(project, "--collect-only", "-q").stdout
    assert outcomes(run_testmon(project, "test_b.py").stdout) == "1 passed, 1 deselected"
    assert outcomes(run_testmon(project, "-k", "else").stdout) == "2 passed, 2 deselected"
    assert outcomes(run_testmon(project).stdout) == "1 passed, 1 deselected"
    assert "no tests ran" in run_testmon(project).stdout


def test_lines_are_counted_for_every_test_that_ran_them_with_coverages_sysmon(tmp_path: Path) -> None:
    project = write_project(
        tmp_path,
        {
            "module.py": MODULE,
            "test_it.py": "from module import used\ndef test_one(): used(1)\ndef test_two(): used(2)\ndef test_three(): 1\n",
        },
    )
    assert run_testmon(project, COVERAGE_CORE="sysmon").returncode == 0
    with edited(project, "module.py", "return x", "return x + 0"):
        assert selected(project) == {"test_one", "test_two"}


def test_tests_that_run_in_xdist_workers_are_recorded(tmp_path: Path) -> None:
    project = write_project(
        tmp_path,
        {
            "module.py": MODULE,
            "test_it.py": "from module import other, used\ndef test_one(): used(1)\ndef test_two(): other(2)\n",
        },
    )
    assert outcomes(run_testmon(project, "-n", "2").stdout) == "2 passed"
    with edited(project, "module.py", "return x", "return x + 0"):
        assert selected(project) == {"test_one"}
        assert outcomes(run_testmon(project, "-n", "2").stdout) == "1 passed"


def test_a_damaged_database_runs_every_test_and_is_rebuilt(tmp_path: Path) -> None:
    project = write_project(tmp_path, {"test_it.py": "def test_one(): pass\ndef test_two(): pass\n"})
    run_testmon(project)
    for log in project.glob(".testmondata-*"):
        log.unlink()  # SQLite would mend the file with it
    (project / ".testmondata").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    run = run_testmon(project)
    assert outcomes(run.stdout) == "2 passed"
    assert ".testmondata was damaged" in run.stdout
    assert selected(project) == set()


def test_tests_recorded_by_testmon_alone_run_again(tmp_path: Path) -> None:
    project = write_project(tmp_path, {"test_it.py": "def test_one(): pass\ndef test_two(): pass\n"})
    run_testmon(project, "-p", "no:rlcanary-selection")
    run = run_testmon(project)
    assert outcomes(run.stdout) == "2 passed"
    assert "processes run again: 2" in run.stdout
    assert selected(project) == set()


def test_without_testmon_nothing_is_recorded(tmp_path: Path) -> None:
    project = write_project(
        tmp_path, {"test_it.py": "import os\ndef test_one(): assert 'RLCANARY_SELECTION' not in os.environ"}
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:rlcanary-tracker"],
        cwd=project,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcomes(run.stdout) == "1 passed"
    assert not (project / ".testmondata").exists()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("settings.yaml", b"a: 1", b"a: 2"), ("vocab", b"a b", b"a c"), ("weights.bin", b"\xff\xfe\x00", b"\xff\xfe\x01")],
)
def test_data_files_of_any_kind_are_dependencies(tmp_path: Path, name: str, before: bytes, after: bytes) -> None:
    project = write_project(
        tmp_path,
        {
            "test_it.py": f"from pathlib import Path\nDATA = Path(__file__).with_name('{name}')\n"
            "def test_one(): assert DATA.read_bytes()\ndef test_two(): pass\n"
        },
    )
    (project / name).write_bytes(before)
    run_testmon(project)
    (project / name).touch()
    assert selected(project) == set()
    (project / name).write_bytes(after)
    assert selected(project) == {"test_one"}
    (project / name).unlink()
    assert selected(project) == {"test_one"}


def test_what_a_run_writes_is_not_a_dependency(tmp_path: Path) -> None:
    project = write_project(
        tmp_path,
        {
            "test_it.py": "import time\nfrom pathlib import Path\nOUT = Path(__file__).with_name('out.json')\n"
            "def test_one():\n    OUT.write_text(str(time.time()))\n    assert OUT.read_text()\n"
        },
    )
    run_testmon(project)
    (project / "out.json").write_text("other")
    assert selected(project) == set()


def test_a_folder_that_cannot_be_written_selects_and_says_that_nothing_is_kept(tmp_path: Path) -> None:
    project = write_project(
        tmp_path / "project",
        {"module.py": MODULE, "test_it.py": "from module import used\ndef test_one(): used(1)\ndef test_two(): pass\n"},
    )
    run_testmon(project)
    (project / "module.py").write_text(MODULE.replace("return x", "return x + 0", 1))
    read_only = [
        "unshare",
        "-m",
        "sh",
        "-c",
        'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && cd "$0" && exec "$@"',
    ]
    if subprocess.run([*read_only, str(project), "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a folder read-only")
    command = [sys.executable, "-m", "pytest", "--testmon", "-p", "no:rlcanary-tracker", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*read_only, str(project), *command], env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert outcomes(run.stdout) == "1 passed, 1 deselected", run.stdout
    assert "cannot be written" in run.stdout
    assert selected(project) == {"test_one"}


def test_a_private_name_of_ray_that_moved_makes_tests_depend_on_all_code(tmp_path: Path) -> None:
    project = write_project(
        tmp_path,
        {
            "module.py": MODULE,
            "elsewhere.py": "def never_run():\n    return 1\n",
            "conftest.py": "import ray.actor\n",
            "ray/__init__.py": "",
            "ray/actor.py": "class ActorHandle:\n    pass\n",
            "test_it.py": "from module import used\ndef test_one(): used(1)\n",
        },
    )
    run = run_testmon(project, PYTHONPATH=str(project))
    assert outcomes(run.stdout) == "1 passed"
    assert "calls cannot be recorded" in run.stdout
    with edited(project, "elsewhere.py", "return 1", "return 2"):
        assert selected(project) == {"test_one"}


def test_a_file_without_statements_can_be_edited(tmp_path: Path) -> None:
    project = write_project(
        tmp_path, {"module.py": "# nothing yet\n", "test_it.py": "import module\ndef test_one(): pass\n"}
    )
    run_testmon(project)
    with edited(project, "module.py", "# nothing yet", "X = 1"):
        assert selected(project) == {"test_one"}
    with edited(project, "module.py", "# nothing yet", "# still nothing"):
        assert selected(project) == set()


def test_a_child_that_cannot_record_makes_the_test_depend_on_what_it_imports(tmp_path: Path) -> None:
    project = write_project(
        tmp_path,
        {
            "module.py": MODULE,
            "script.py": "import sys\nsys.path.insert(0, '.')\nfrom module import used\nused(1)\n",
            "test_it.py": "import subprocess, sys\ndef test_one():\n"
            "    subprocess.run([sys.executable, '-I', 'script.py'], check=True)\ndef test_two(): pass\n",
        },
    )
    run = run_testmon(project)
    assert outcomes(run.stdout) == "2 passed"
    assert "calls of 1 tests" in run.stdout
    with edited(project, "module.py", "return x", "return x + 0"):
        assert selected(project) == {"test_one"}


def command(*arguments: str) -> str:
    return CliRunner().invoke(selection, arguments, catch_exceptions=False).output


def test_the_command_tells_what_a_test_uses_and_which_tests_use_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = write_project(
        tmp_path,
        {
            "module.py": MODULE,
            "script.py": "from module import other\nother(1)\n",
            "test_it.py": "import subprocess, sys\nfrom module import used\ndef test_one(): used(1)\n"
            "def test_two(): subprocess.run([sys.executable, 'script.py'], check=True)\n",
        },
    )
    run_testmon(project)
    (project / "folder").mkdir()
    monkeypatch.chdir(project / "folder")
    explained = " ".join(command("explain", "two").split())
    assert "module.py" in explained
    assert "other │ subprocess" in explained
    assert "used" not in explained
    assert "test_it.py::test_one │ the test process" in command("why", "../module.py", "used")
    assert "no test depends on" in command("why", "../conftest.py")
    with pytest.raises(UserError, match="2 tests have 'test_it'"):
        command("explain", "test_it")
    assert "removed" in command("reset")
    with pytest.raises(UserError, match="run `pytest --testmon` first"):
        command("explain", "two")


def test_an_xdist_worker_that_starts_late_runs_the_same_tests(tmp_path: Path) -> None:
    late = """
        import os
        import time
        from testmon.db import DB

        def late(self, *given):  # reads before gw0 has collected, and goes on after it
            while not self.con.execute("SELECT 1 FROM test_execution").fetchone():
                time.sleep(0.01)
            return {"affected": [], "failing": []}

        if os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
            DB.determine_tests = late
        """
    project = write_project(
        tmp_path,
        {"test_it.py": "def test_one(): pass\ndef test_two(): pass\n", "conftest.py": textwrap.dedent(late)},
    )
    run = run_testmon(project, "-n", "2")
    assert outcomes(run.stdout) == "2 passed", run.stdout
    assert selected(project) == set()


def test_an_xdist_worker_in_place_of_one_that_died_runs_the_rest(tmp_path: Path) -> None:
    tests = {f"test_{name}.py": f"def test_{name}(): pass\n" for name in "acd"}
    project = write_project(tmp_path, {**tests, "test_b.py": "import os\ndef test_b(): os._exit(1)\n"})
    run = run_testmon(project, "-n", "1")
    assert outcomes(run.stdout) == "1 failed, 3 passed", run.stdout
    assert selected(project) == {"test_b"}
