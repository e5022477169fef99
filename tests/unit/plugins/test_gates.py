"""Which tests a gate holds back, from marks, flags and the machine."""

import sys
import types
from pathlib import Path

import pytest

from rlcanary.errors import UserError
from rlcanary.gates import BUILT_IN, Gate, Machine, Mark, check_flags, held_back, read_gates

MCORE = Gate("mcore", "only", "needs Megatron")
GATES = [*BUILT_IN, MCORE]
NO_GPU, TWO_GPUS = Machine(gpus=0), Machine(gpus=2)


def reasons(*marks: Mark, flags: tuple[str, ...] = (), machine: Machine = NO_GPU) -> list[str]:
    return [held.reason for held in held_back(marks, GATES, flags, machine)]


@pytest.mark.parametrize(
    ("marks", "flags", "runs"),
    [
        ([], [], True),
        (["hf_gated"], [], False),
        (["hf_gated"], ["hf_gated"], True),
        ([], ["hf_gated"], True),
        (["mcore"], [], False),
        (["mcore"], ["mcore"], True),
        ([], ["mcore"], False),
        (["mcore", "hf_gated"], ["mcore"], False),
        (["mcore", "hf_gated"], ["hf_gated"], False),
        (["mcore", "hf_gated"], ["mcore", "hf_gated"], True),
        (["hf_gated"], ["mcore", "hf_gated"], False),
    ],
)
def test_include_flags_add_and_only_flags_restrict(marks: list[str], flags: list[str], runs: bool) -> None:
    assert (reasons(*map(Mark, marks), flags=tuple(flags)) == []) is runs


def test_reason_names_the_flag_that_lets_the_test_run() -> None:
    (nightly,), (mcore,) = reasons(Mark("nightly")), reasons(Mark("mcore"))
    assert "--nightly runs it" in nightly
    assert "--mcore-only runs it" in mcore


def test_every_reason_is_given() -> None:
    assert len(reasons(Mark("hf_gated"), Mark("gpus", (2,)), Mark("requires", ("no-such-package>=1",)))) == 3


def test_test_that_needs_more_gpus_than_are_visible_is_held_back() -> None:
    assert reasons(Mark("gpus", (4,)), machine=TWO_GPUS) == ["needs 4 GPUs, 2 are visible"]
    assert reasons(Mark("gpus", (2,)), machine=TWO_GPUS) == []


@pytest.mark.parametrize("arguments", [(), (0,), ("2",), (1, 2), (True,)])
def test_number_of_gpus_must_be_one_whole_number(arguments: tuple[object, ...]) -> None:
    with pytest.raises(UserError, match="gpus takes one whole number"):
        reasons(Mark("gpus", arguments))


@pytest.mark.parametrize("requirement", ["pytest>=8", "pytest-timeout", "pytest_timeout>=2", "yaml", "json"])
def test_requirement_that_is_installed_is_met_by_the_name_of_distribution_or_module(requirement: str) -> None:
    if requirement == "yaml":
        pytest.importorskip("yaml")
    assert reasons(Mark("requires", (requirement,))) == []


@pytest.mark.parametrize(
    ("requirement", "reason"),
    [
        ("pytest>=1000", "installed is pytest 9"),
        ("no_such_module", "no_such_module is not"),
    ],
)
def test_requirement_that_is_not_met_says_why(requirement: str, reason: str) -> None:
    assert reason in reasons(Mark("requires", (requirement,)))[0]


def test_requirement_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="'vllm => 1' is no requirement"):
        reasons(Mark("requires", ("vllm => 1",)))


@pytest.mark.parametrize(
    ("mark", "got"),
    [
        (Mark("requires"), r"got \(\)"),
        (Mark("requires", ("pytest",), ("version",)), "'pytest', version="),
    ],
)
def test_requirement_that_would_be_overlooked_is_refused(mark: Mark, got: str) -> None:
    with pytest.raises(UserError, match=f"requires takes requirements, .*{got}"):
        reasons(mark)


def test_module_that_a_conftest_stubs_is_there_and_one_that_it_blocks_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "ray", None)
    assert reasons(Mark("vllm")) == []
    assert reasons(Mark("ray")) == ["needs ray, which is not installed"]


def test_two_only_flags_exclude_each_other() -> None:
    with pytest.raises(UserError, match="-only exclude each other"):
        check_flags([MCORE, Gate("automodel", "only", "")], ["mcore", "automodel"])


def test_flag_whose_module_is_missing_is_refused_with_what_to_install() -> None:
    gate = Gate("mcore", "only", "", module="no_such_module.core", install="uv sync --extra mcore")
    with pytest.raises(UserError, match=r"no_such_module\.core.* mcore"):
        check_flags([gate], ["mcore"])
    check_flags([gate], [])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('[tool.rlcanary.gates.slow]\nkind = "some"', 'must be "include" or "only"'),
        ('[tool.rlcanary.gates.slow]\nkind = "only"\nmodul = "x"', "unknown modul"),
        ('[tool.rlcanary.gates.gpus]\nkind = "only"', "gpus is a gate of rlcanary"),
        ('[tool.rlcanary.gates."a b"]\nkind = "only"', "must be a Python identifier"),
        ('[tool.rlcanary.gates.slow]\nkind = "only"\nmodule = 3', "module must be a text, got 3"),
        ("[tool.rlcanary]\ngates = 1", "gates are .* tables, got gates = 1"),
        ("[tool]\nrlcanary = 1", "gates are .* tables, got rlcanary = 1"),
        ("[tool", "cannot be read"),
    ],
)
def test_declaration_that_cannot_be_understood_is_refused(tmp_path: Path, table: str, message: str) -> None:
    (tmp_path / "pyproject.toml").write_text(table)
    with pytest.raises(UserError, match=message):
        read_gates(tmp_path)
