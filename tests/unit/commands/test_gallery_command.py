"""`rlcanary gallery` as it is typed."""

from pathlib import Path

from command_line import rlcanary


def test_columns_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        arguments = ("--only=mask.pad_id_zero", f"--json={folder}/today.json")
        assert rlcanary("check", "reference", *arguments, cwd=tmp_path).returncode == 0
    assert rlcanary("gallery", "old/today.json", "new/today.json", cwd=tmp_path).returncode == 0
    page = (tmp_path / "gallery.html").read_text()
    assert "(old/today.json)" in page
    assert "(new/today.json)" in page


MISFIT = """
from pathlib import Path

from rlcanary import Adapter
from rlcanary.checks import tally

tally.ADAPTERS = Path(__file__).parents[1]  # a bundled adapter, whose own errors are no failures of the framework

class Misfit(Adapter):
    name = "misfit"

    def advantages(self, rewards, group_ids):
        return rewards.mean(an_argument_of_another_release=1)
"""


def test_adapter_whose_checks_all_met_errors_of_its_own_is_shown_as_such(tmp_path: Path) -> None:
    (tmp_path / "misfit.py").write_text(MISFIT)
    checks = "advantage.shift,advantage.groups_are_separate"
    assert rlcanary("check", "misfit.py", f"--only={checks}", "--json=today.json", cwd=tmp_path).returncode == 3
    done = rlcanary("gallery", "today.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "gallery.html").read_text()
    assert "<td>⚠ 2" in page
    assert "met an adapter error: TypeError" in page


def test_adapter_whose_check_ends_with_3_is_shown(tmp_path: Path) -> None:
    (tmp_path / "misfit.py").write_text(MISFIT)
    done = rlcanary("gallery", "misfit.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "<td>⚠ " in (tmp_path / "gallery.html").read_text()
