"""An error of a bundled adapter itself is a status of its own in every output, and never a failure of the framework."""

import json
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from command_line import rlcanary

from rlcanary.checks import tally

SCHEMA = Path(__file__).parents[3] / "docs/check-results.schema.json"
# It asks the framework for an argument of a newer release wherever a group has more than two rewards.
MISFIT = """
from rlcanary.adapters.reference import ReferenceAdapter

def baseline(rewards):
    return rewards.mean()

class Misfit(ReferenceAdapter):
    name = "misfit"

    def advantages(self, rewards, group_ids):
        return super().advantages(rewards, group_ids) + (baseline(rewards, ddof=1) if len(rewards) > 2 else 0)

    def configurations(self):
        return {"old": self, "wrong": AlsoWrong()}

class AlsoWrong(Misfit):
    name = "also_wrong"

    def completion_mask(self, ids, eos_ids, pad_id):
        return ~super().completion_mask(ids, eos_ids, pad_id)
"""
MET = "advantage.groups_are_separate"
ONLY = f"--only={MET},mask.pad_id_zero"


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of bundled adapters, with one that does not fit its framework."""
    folder = tmp_path / "adapters"
    (folder / "someframe").mkdir(parents=True)
    (folder / "someframe" / "canary.py").write_text(MISFIT)
    monkeypatch.setattr(tally, "ADAPTERS", folder)
    return folder / "someframe"


def test_every_output_of_a_run_names_the_adapter_error_and_the_exit_code_is_3(bundled: Path) -> None:
    files = ("--json=out.json", "--junit=out.xml", "--html=out.html", "--markdown=out.md")
    done = rlcanary("check", "canary.py:Misfit", ONLY, *files, cwd=bundled)
    assert done.returncode == 3
    assert f"adapter error in {MET}: TypeError: baseline() got an unexpected keyword" in done.stderr
    assert "adapters/someframe/canary.py" in done.stderr
    assert "1 of 2 checks ran, 1 met an adapter error" in done.stdout
    assert "1 passed, 1 adapter error in" in done.stdout
    document = json.loads((bundled / "out.json").read_text())
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
    assert {each["id"]: each["status"] for each in document["checks"]}[MET] == "adapter-error"
    assert (document["coverage"]["ran"], document["coverage"]["adapter_errors"]) == (1, 1)
    (error,) = ElementTree.parse(bundled / "out.xml").getroot().iter("error")
    assert error.get("type") == "adapter-error"
    assert "<b class=muted>1</b> adapter errors" in (bundled / "out.html").read_text()
    assert f"`{MET}` met an adapter error" in (bundled / "out.md").read_text()


def test_a_failure_beside_an_adapter_error_exits_with_1(bundled: Path) -> None:
    assert rlcanary("check", "canary.py:AlsoWrong", ONLY, cwd=bundled).returncode == 1


def test_an_adapter_error_can_be_expected_and_is_stale_when_it_is_gone(bundled: Path) -> None:
    chosen = ("canary.py:Misfit", ONLY)
    rlcanary("check", *chosen, "--update-expected=known.txt", cwd=bundled)
    known = bundled / "known.txt"
    assert known.read_text() == f"{MET}  # say why\n    adapter error\n"
    known.write_text(known.read_text().replace("say why", "mended in the next release"))
    assert rlcanary("check", *chosen, "--expected=known.txt", cwd=bundled).returncode == 0
    known.write_text(f"{MET}  # rounding\n    value off by 1\n")
    assert rlcanary("check", *chosen, "--expected=known.txt", cwd=bundled).returncode == 3
    known.write_text(f"{MET}  # mended\n    adapter error\n")
    done = rlcanary("check", "reference", ONLY, "--expected=known.txt", cwd=bundled)
    assert done.returncode == 1
    assert f"stale {MET}" in done.stdout


def test_a_matrix_shows_an_adapter_error_as_such_and_exits_with_3_unless_something_failed(bundled: Path) -> None:
    done = rlcanary("check", "canary.py:Misfit", "--matrix", f"--only={MET}", cwd=bundled)
    assert done.returncode == 3, done.stderr
    assert f"adapter error {MET} in old, wrong" in done.stdout
    assert "TypeError: baseline() got an unexpected keyword" in done.stdout
    assert rlcanary("check", "canary.py:Misfit", "--matrix", ONLY, cwd=bundled).returncode == 1


@pytest.mark.parametrize("workers", [(), ("-p", "xdist.plugin", "-n", "1")], ids=["alone", "under xdist"])
def test_pytest_counts_it_by_that_name_and_ends_with_3(
    pytester: pytest.Pytester, workers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    folder = pytester.path / "adapters"
    monkeypatch.setattr(tally, "ADAPTERS", folder)
    if workers:
        pytester.makeconftest(
            f"from pathlib import Path\nfrom rlcanary.checks import tally\ntally.ADAPTERS = Path({str(folder)!r})\n"
        )
    (folder / "someframe").mkdir(parents=True)
    (folder / "someframe" / "canary.py").write_text(MISFIT)
    spec = "adapters/someframe/canary.py:Misfit"
    arguments = ("--canary", spec, "-k", "groups_are_separate or pad_id_zero")
    run = pytester.runpytest_subprocess if workers else pytester.runpytest_inprocess
    result = run("-p", "pytest_rlcanary.conformance", *workers, *arguments)
    assert result.ret == pytest.ExitCode.INTERNAL_ERROR
    result.stdout.fnmatch_lines(
        [
            "canary misfit: 1 of 2 checks ran, 1 met an adapter error; not checked: advantage",
            "*met an error of the adapter itself*",
            f"canary?misfit?::{MET}: TypeError: *",
            "*1 passed*1 adapter error*",
        ]
    )
