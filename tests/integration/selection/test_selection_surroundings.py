"""What lies around the code of a test: other programs, caches on disk, new files, variables and installed packages."""

from pathlib import Path

import pytest
from selection_session import edited, run_testmon, selected, stored_tests, write_project

MODULE = "def used(x):\n    return x\n"


def test_a_file_edited_while_it_is_used_selects_the_test(tmp_path: Path) -> None:
    """The edit is made by a program that is not Python, as an editor is."""
    project = write_project(
        tmp_path,
        {
            "module.py": MODULE,
            "data.json": "1",
            "test_it.py": "import subprocess\nfrom pathlib import Path\nfrom module import used\n"
            "def test_code():\n    used(1)\n    subprocess.run('printf \"def used(x): return 2\" > module.py', shell=True)\n"
            "def test_data():\n    Path('data.json').read_text()\n"
            "    subprocess.run('cp data.json new && mv new data.json', shell=True)\n"
            "def test_neither(): pass\n",
        },
    )
    assert run_testmon(project, "-q").returncode == 0
    assert {"test_code", "test_data"} <= selected(project)
    assert "test_neither" in {test.partition("::")[2] for test in stored_tests(project)}


def test_a_file_that_a_warm_cache_stands_for_stays_a_dependency(tmp_path: Path) -> None:
    """As `datasets` does, the loader reads the file once, and later compares its time of change only."""
    project = write_project(
        tmp_path,
        {
            "data/train.jsonl": "{}",
            "loader.py": "import os, pathlib, pickle\nCACHE = pathlib.Path(os.environ['CACHE'])\ndef load(path):\n"
            "    key = os.stat(path).st_mtime_ns\n"
            "    if CACHE.exists() and pickle.loads(CACHE.read_bytes())[0] == key:\n"
            "        return pickle.loads(CACHE.read_bytes())[1]\n"
            "    text = pathlib.Path(path).read_text()\n    CACHE.write_bytes(pickle.dumps((key, text)))\n    return text\n",
            "test_it.py": "from loader import load\ndef test_one():\n    assert load('data/train.jsonl')\n",
        },
    )
    cache = str(tmp_path.parent / f"{tmp_path.name}-cache")
    for turn in range(2):
        assert run_testmon(project, "-q", CACHE=cache).returncode == 0
        with edited(project, "data/train.jsonl", "{}", "{ }"):
            assert selected(project) == {"test_one"}
        (project / "test_it.py").write_text((project / "test_it.py").read_text() + f"    assert {turn + 1}\n")


def test_a_new_conftest_selects_the_tests_beside_it(tmp_path: Path) -> None:
    project = write_project(tmp_path, {"a/test_a.py": "def test_a(): pass\n", "b/test_b.py": "def test_b(): pass\n"})
    assert run_testmon(project, "-q").returncode == 0
    (project / "a/conftest.py").write_text("import pytest\n@pytest.fixture(autouse=True)\ndef strict(): assert 0\n")
    assert selected(project) == {"test_a"}


def test_chosen_variables_select_every_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = write_project(tmp_path, {"test_a.py": "def test_a(): pass\n"})
    (project / "pytest.ini").write_text("[pytest]\nrlcanary_selection_environment = CHOSEN_* OTHER\n")
    assert run_testmon(project, "-q").returncode == 0
    monkeypatch.setenv("NOT_CHOSEN", "1")
    assert selected(project) == set()
    monkeypatch.setenv("CHOSEN_MODE", "1")
    assert selected(project) == {"test_a"}


def test_a_patch_release_of_a_package_runs_every_test(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    release = "Metadata-Version: 2.1\nName: wheeled\nVersion: 1.2.{}\n"
    project = write_project(tmp_path / "project", {"test_a.py": "def test_a(): pass\n"})
    write_project(packages, {"wheeled-1.2.3.dist-info/METADATA": release.format(3)})
    assert "1 passed" in run_testmon(project, "-q", PYTHONPATH=str(packages)).stdout
    assert "no tests ran" in run_testmon(project, "-q", PYTHONPATH=str(packages)).stdout
    (packages / "wheeled-1.2.3.dist-info/METADATA").write_text(release.format(4))
    assert "1 passed" in run_testmon(project, "-q", PYTHONPATH=str(packages)).stdout


def test_the_summary_names_the_kinds_of_what_is_not_seen_where_they_may_apply(tmp_path: Path) -> None:
    tests = {
        "plain": "def test_it(): pass\n",
        "cases": "import subprocess\nimport module\n"
        "def test_state():\n    module.leave(1)\n    assert module.found('json')\n"
        "def test_process():\n    module.process = subprocess.Popen(['sleep', '300'])\n"
        "def test_end():\n    module.process.kill()\n    module.process.wait()\n",
    }
    module = (
        "left = made = process = None\ndef leave(x):\n    global left\n    left = x\n"
        "def make(x):\n    global made\n    if made is None:\n        made = x\n    return made\n"
        "def found(name):\n    make(1)\n    return __import__(name)\n"
    )
    said = {}
    for number, (name, test) in enumerate(tests.items()):
        project = write_project(tmp_path / str(number), {"module.py": module, "test_it.py": test})
        run = run_testmon(project, "-q", "-p", "no:rlcanary-cleanup")
        said[name] = [line for line in run.stdout.splitlines() if line.startswith("rlcanary: selection: ")]
    assert said["plain"] == []
    text = "\n".join(said["cases"])
    assert len(said["cases"]) == 3, text
    assert "leave in globals: module.py: leave\n" in f"{text}\n"
    assert "computed name count for the first test: module.py: found" in text
    assert "a process outlived the test that started it" in text


@pytest.mark.parametrize("how", ["-p", "conftest"])
def test_a_plugin_that_is_imported_before_recording_begins_is_named(tmp_path: Path, how: str) -> None:
    project = write_project(
        tmp_path,
        {
            "plugin.py": "from made import table\nTABLE = table()\n",
            "made.py": "def table():\n    return [1]\n",
            "test_it.py": "def test_it(): pass\n",
            **({"conftest.py": "pytest_plugins = ['plugin']\n"} if how == "conftest" else {}),
        },
    )
    (project / "pytest.ini").write_text("[pytest]\npythonpath = .\n" + ("addopts = -p plugin\n" if how == "-p" else ""))
    said = run_testmon(project).stdout
    assert ("before recording began, is not seen: made, plugin" in said) is (how == "-p"), said
    with edited(project, "made.py", "[1]", "[2]"):
        assert selected(project) == (set() if how == "-p" else {"test_it"})
