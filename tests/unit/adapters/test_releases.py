"""Releases of a framework: which one is imported, and what happens where an adapter does not fit it."""

import importlib
import importlib.util
import subprocess
from pathlib import Path

import pytest

from rlcanary.adapters.frameworks import forget, hidden, part, release, usable
from rlcanary.checks.tally import ADAPTERS, Tally
from rlcanary.contract.declining import NotProvided
from rlcanary.errors import UserError


def written(folder: Path, version: str | None) -> Path:
    """Write a package `someframe`, installed with this version unless it is None."""
    (folder / "someframe").mkdir(parents=True)
    (folder / "someframe" / "__init__.py").write_text("")
    if version is not None:
        info = folder / f"someframe-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: someframe\nVersion: {version}\n")
    return folder


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    forget("someframe")


def test_the_release_is_that_of_the_package_that_comes_first_on_the_path(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(written(tmp_path / "new", "1.16.0")))
    monkeypatch.syspath_prepend(str(written(tmp_path / "old", "1.4.0")))
    assert release("someframe") == "1.4.0"


def test_a_checkout_has_its_commit_although_a_release_is_installed_behind_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(written(tmp_path / "installed", "0.1.0")))
    checkout = written(tmp_path / "checkout", None)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "All"]):
        subprocess.run(["git", *arguments], cwd=checkout, check=True)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=checkout, text=True).strip()
    monkeypatch.syspath_prepend(str(checkout))
    assert release("someframe") == f"commit {commit}"
    with usable("someframe", "", "someframe 1", at_least="1.0"):
        pass  # A checkout is not refused for the release that is installed.


def test_an_older_release_on_the_path_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(written(tmp_path, "0.9")))
    with pytest.raises(UserError, match="it is older"), usable("someframe", "", "someframe 1", at_least="1.0"):
        pass


def test_a_hidden_package_is_not_found_and_found_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(written(tmp_path, None)))
    with hidden("someframe"):
        assert importlib.util.find_spec("someframe") is None
    assert importlib.util.find_spec("someframe") is not None


@pytest.mark.parametrize("error", ["ImportError('no name')", "AttributeError('no part')", "TypeError('no argument')"])
def test_what_a_bundled_adapter_misses_in_a_release_is_not_charged_to_the_framework(error):
    tally = Tally()
    code = compile(f"def call():\n    raise {error}\n", str(ADAPTERS / "someframe" / "objective.py"), "exec")
    names: dict = {}
    exec(code, names)
    with tally.case("one"):
        names["call"]()
    assert tally.found == []
    assert tally.declined == []
    assert "adapters/someframe/objective.py" in tally.misfits[0]


def test_what_a_bundled_adapter_looks_up_by_a_library_is_its_own():
    tally = Tally()
    text = "import unittest.mock\ndef call(module):\n    unittest.mock.patch.object(module, 'no_such_name').start()\n"
    names: dict = {}
    exec(compile(text, str(ADAPTERS / "someframe" / "state.py"), "exec"), names)
    with tally.case("one"):
        names["call"](importlib)
    assert tally.found == []
    assert "line 3 of adapters/someframe/state.py" in tally.misfits[0]


@pytest.mark.parametrize("place", ["elsewhere/objective.py", ADAPTERS / "reference.py", ADAPTERS / "grpo/adapter.py"])
def test_the_same_error_in_other_code_is_found(place):
    tally = Tally()
    names: dict = {}
    exec(compile("def call():\n    raise AttributeError('no part')\n", str(place), "exec"), names)
    with tally.case("one"):
        names["call"]()
    assert [found.is_error for found in tally.found] == [True]


def test_a_part_whose_module_imports_what_is_not_installed_says_so(tmp_path, monkeypatch):
    (written(tmp_path, None) / "someframe" / "advantage.py").write_text("import no_such_package.utils\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotProvided, match="cannot be imported: no_such_package is not installed"):
        part("someframe.advantage:compute")
    with pytest.raises(NotProvided, match="this release of someframe has no compute"):
        part("someframe.loss:compute")


def test_a_part_that_trl_does_not_have_is_declined():
    pytest.importorskip("trl")
    releases = importlib.import_module("rlcanary.adapters.trl.releases")
    with pytest.raises(NotProvided, match="no such_part"):
        releases.part("trl.trainer.utils:such_part")
    assert not releases.has_part("trl.no_such_module:anything")
    assert releases.knows_loss("sigmoid")
    assert not releases.knows_loss("no_such_loss")


def test_transformers_answers_as_it_once_did_only_while_an_older_trl_is_imported():
    pytest.importorskip("trl")
    import_utils = importlib.import_module("transformers.utils.import_utils")
    releases = importlib.import_module("rlcanary.adapters.trl.releases")
    with releases.packages_as_flags():
        assert not import_utils._is_package_available("no_such_package")
        assert import_utils._is_package_available("transformers")
        assert import_utils._is_package_available("no_such_package")[0] is False
        assert import_utils._is_package_available("no_such_package", return_version=True)[0] is False
    assert bool(import_utils._is_package_available("no_such_package")) is True


def test_the_installed_verl_is_sent_rows_without_padding():
    pytest.importorskip("verl")
    importlib.import_module("rlcanary.adapters").load_adapter("verl")
    assert not importlib.import_module("rlcanary.adapters.verl.workers.engine").keeps_padding()
