"""Who may import whom: every contract of .importlinter is kept, and nothing heavy is imported before it is used."""

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "ray", "vllm", "transformers", "trl", "verl", "torchrl", "datasets", "pydantic"}

contracts = configparser.ConfigParser()
contracts.read(ROOT / ".importlinter")
CONTRACTS = [section.rpartition(":")[2] for section in contracts.sections() if ":contract:" in section]


def heavy_imports(code: str, cwd: Path) -> set[str]:
    """The heavy packages that a fresh interpreter has imported after running `code`."""
    script = f"{code}\nimport sys\nprint('imported:', *{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("imported:")]
    return HEAVY & set(line.split())


@pytest.mark.parametrize("contract", CONTRACTS)
def test_import_rule_is_kept(contract: str) -> None:
    linter = str(Path(sys.executable).with_name("lint-imports"))
    done = subprocess.run([linter, "--contract", contract], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


ADAPTERS = {path.stem for path in (ROOT / "harness/rlcanary/adapters").glob("*.py")} - {"template"}  # a user's own file


@pytest.mark.parametrize("module", sorted(ADAPTERS))
def test_adapter_module_imports_no_framework(module: str, tmp_path: Path) -> None:
    assert heavy_imports(f"import rlcanary.adapters.{module}", tmp_path) == set()


def test_command_line_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['rlcanary', '--help']\ntry:\n    import rlcanary.__main__\nexcept SystemExit: pass"
    assert heavy_imports(code, tmp_path) == set()


def test_pytest_with_every_plugin_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(tracker):\n    tracker.track('answer', 42)\n")
    assert heavy_imports("import pytest; assert pytest.main(['-q']) == 0", tmp_path) == set()


def test_no_file_of_the_project_is_hidden_from_the_linters() -> None:
    """ruff leaves out what .gitignore names, also where the file is tracked."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True, check=True).stdout == ""
