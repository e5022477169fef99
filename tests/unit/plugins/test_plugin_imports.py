"""How pytest imports the plugins where rlcanary is installed from a wheel."""

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[3]
RUN = """
import sys

def test_it():
    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "rlcanary"]
    assert len(ours) > 5
    assert {type(module.__loader__).__name__ for module in ours} == {"SourceFileLoader"}
"""


def test_pytest_rewrites_none_of_the_modules_behind_the_plugins(tmp_path: Path) -> None:
    installed = distribution("rlcanary")
    site, project = tmp_path / "site", tmp_path / "project"
    info = site / f"rlcanary-{installed.version}.dist-info"
    info.mkdir(parents=True)
    for package in (ROOT / "harness/rlcanary", ROOT / "plugins/pytest_rlcanary"):
        (site / package.name).symlink_to(package)
    for name in ("METADATA", "entry_points.txt"):
        (info / name).write_text(installed.read_text(name) or "")
    (info / "RECORD").write_text("rlcanary/__init__.py,,\npytest_rlcanary/__init__.py,,\n")
    project.mkdir()
    (project / "test_it.py").write_text(RUN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=project, env={"PYTHONPATH": str(site)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
