"""Naming an adapter: what is found, and the one line that a mistake gets."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlcanary.adapters import Adapter, load_adapter, provided
from rlcanary.adapters.load import misspelt, outdated
from rlcanary.errors import UserError

ADAPTER = """
from rlcanary.adapters import Adapter

class Mine(Adapter):
    name = "mine"

    def keep_group(self, rewards):
        return True
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_bundled_adapter_by_name() -> None:
    assert load_adapter("reference").name == "reference"


def test_module_with_one_adapter(package: Path) -> None:
    (package / "only_adapter.py").write_text(ADAPTER)
    assert load_adapter("only_adapter").name == "mine"


def test_module_and_class(package: Path) -> None:
    (package / "named_adapter.py").write_text(ADAPTER)
    adapter = load_adapter("named_adapter:Mine")
    assert provided(adapter) == {"keep_group"}


def test_python_file(package: Path) -> None:
    path = package / "with some spaces.py"
    path.write_text(ADAPTER)
    assert load_adapter(str(path)).name == "mine"
    assert load_adapter(f"{path}:Mine").name == "mine"


def test_an_adapter_without_a_name_of_its_own_is_reported_under_its_class(package: Path) -> None:
    extending = "from rlcanary.adapters.reference import ReferenceAdapter\n\nclass Ours(ReferenceAdapter):\n"
    (package / "extending.py").write_text(extending + "    pass\n")
    assert load_adapter("extending.py").name == "Ours"
    (package / "naming.py").write_text(extending + "    name = 'ours'\n")
    assert load_adapter("naming.py").name == "ours"
    (package / "of_the_instance.py").write_text(
        extending + "    def __init__(self):\n        super().__init__()\n        self.name = 'built'\n"
    )
    assert load_adapter("of_the_instance.py").name == "built"
    assert load_adapter("rlcanary.adapters.reference:ReferenceAdapter").name == "reference"


def test_capability_set_on_the_instance_counts() -> None:
    class Bare(Adapter):
        pass

    adapter = Bare()
    adapter.keep_group = lambda rewards: True  # type: ignore[method-assign]
    assert provided(adapter) == {"keep_group"}


def test_method_that_is_nearly_a_capability_is_named(package: Path) -> None:
    (package / "nearly.py").write_text(
        ADAPTER + "\n    def advantage(self, rewards, group_ids):\n        return rewards\n"
    )
    assert misspelt(load_adapter("nearly")) == ["advantage is no capability; did you mean advantages?"]
    assert misspelt(load_adapter("reference")) == []


def test_capability_of_an_older_contract_is_taken_and_told_how_to_move(package: Path) -> None:
    old = ADAPTER + "\n    def render(self, messages, tokenizer):\n        return [], []\n"
    (package / "old.py").write_text(old)
    (told,) = outdated(load_adapter("old"))
    assert "`def render(self, messages, tokenizer, tools=None)`" in told
    (package / "new.py").write_text(old.replace("tokenizer)", "tokenizer, tools=None)"))
    assert outdated(load_adapter("new")) == []
    assert outdated(load_adapter("reference")) == []


@pytest.mark.parametrize(
    ("source", "spec", "told"),
    [
        (None, "refrence", "did you mean 'reference'"),
        (None, "no.such.module", "no adapter 'no.such.module'"),
        (None, "missing.py", "no adapter file 'missing.py'"),
        ("import nothing_of_that_name", "broken_import", "failed: ModuleNotFoundError"),
        ("1 / 0", "raises", "failed: ZeroDivisionError"),
        ("def f(:", "syntax", "failed: SyntaxError"),
        ("x = 1", "empty_module", "no adapter in 'empty_module'"),
        (ADAPTER, "wrong_class:Yours", "has no 'Yours'"),
        (ADAPTER + "\nclass Second(Mine): pass", "two", "defines 2 adapters"),
        ("from rlcanary.adapters import Adapter\nclass Bare(Adapter): pass", "bare", "has no capability"),
        (
            ADAPTER.replace("keep_group", "keep_groups"),
            "typo",
            "did you mean keep_group?",
        ),
        (ADAPTER.replace("self, rewards", "self"), "short", "def keep_group(self, rewards)"),
        (
            "from rlcanary.contract.conventions import Conventions\nConventions(kl_coeff=0.1)",
            "convention",
            "did you mean kl_coef?",
        ),
        ("x = 1", "not_adapter:x", "is not an adapter"),
        (
            ADAPTER + "\n    def __init__(self):\n        raise RuntimeError('no weights')",
            "failing",
            "RuntimeError: no weights",
        ),
        (
            ADAPTER + "\n    conventions = property(lambda self: self.nothing)",
            "unreadable",
            "cannot be read: AttributeError",
        ),
        (
            ADAPTER + "\n    conventions = {}",
            "dictionary",
            "are of type dict",
        ),
    ],
)
def test_mistake_gets_one_line(package: Path, source: str | None, spec: str, told: str) -> None:
    if source is not None:
        (package / f"{spec.partition(':')[0]}.py").write_text(source)
    with pytest.raises(UserError, match=re.escape(told)) as caught:
        load_adapter(spec)
    assert "\n" not in str(caught.value)


def install(site: Path, package: str, entry: str) -> None:
    """Lay out an installed distribution that registers an adapter."""
    (site / f"{package}.py").write_text(ADAPTER)
    described = site / f"{package}-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[rlcanary.adapters]\n{entry}\n")


@pytest.mark.parametrize("command", [["rlcanary", "check", "theirs"], ["pytest", "--canary=theirs"]], ids=str)
def test_an_installed_package_registers_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    install(tmp_path, "theirpackage", "theirs = theirpackage:Mine")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    only = ["--only=filter."] if command[0] == "rlcanary" else ["-k", "filter"]
    (tmp_path / "elsewhere").mkdir()
    run = subprocess.run(
        [sys.executable, "-m", *command, *only], cwd=tmp_path / "elsewhere", capture_output=True, text=True, check=False
    )
    assert run.returncode == 1, run.stderr  # the filter keeps every group
    assert "filter." in run.stdout


def test_a_name_that_is_registered_twice_asks_for_the_class(package: Path) -> None:
    install(package, "one_package", "trl = one_package:Mine")
    with pytest.raises(UserError, match=r"one_package:Mine, rlcanary\.adapters\.trl:TrlAdapter"):
        load_adapter("trl")


def test_a_registered_module_that_is_gone_is_named(package: Path) -> None:
    install(package, "stale_package", "stale = gone_module:Mine")
    with pytest.raises(UserError, match=r"'stale' .* 'gone_module'"):
        load_adapter("stale")
