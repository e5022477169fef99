"""`pytest --canary ADAPTER`: each check is an item like any other."""

import pytest

from rlcanary.checks import all_checks

WRONG_MEAN = """
from rlcanary.adapters import Adapter

class WrongMean(Adapter):
    name = "wrong-mean"

    def advantages(self, rewards, group_ids):
        return (rewards - rewards.mean()) / (rewards.std() + 1e-6)
"""


@pytest.fixture(autouse=True)
def only_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def canary(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run pytest with the plugin in this process, which has imported torch already."""
    return pytester.runpytest_inprocess("-p", "pytest_rlcanary.conformance", *arguments)


def test_each_check_is_an_item_beside_the_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own="def test_own(): pass")
    result = canary(pytester, "--canary", "reference", "-q", "--collect-only")
    items = [line for line in result.outlines if "::" in line]
    assert len(items) == len(all_checks()) + 1
    assert any("advantage.constant_reward_is_zero" in item for item in items)


def test_keyword_and_marker_select_checks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own="def test_own(): pass")
    canary(pytester, "--canary", "reference", "-k", "pad_equals_eos").assert_outcomes(
        passed=1, deselected=len(all_checks())
    )
    chosen = canary(pytester, "--canary", "reference", "-m", "canary and not canary")
    assert chosen.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_id_of_a_failure_can_be_pasted_back(pytester: pytest.Pytester) -> None:
    check = "canary[reference]::kl.declared_estimator"
    pytester.makepyfile(test_own="def test_own(): pass")
    canary(pytester, "--canary", "reference", check).assert_outcomes(passed=1)
    canary(pytester, "--canary", "reference", check, "test_own.py").assert_outcomes(passed=2)
    for arguments, problem in (
        ((check,), f"{check}: this is a check: name its adapter with --canary=ADAPTER"),
        (("--canary", "reference", f"{check}s"), f"{check}s: there is no such check; docs/checks/index.md lists them"),
    ):
        result = canary(pytester, *arguments)
        assert result.ret == 2
        assert any(problem in line for line in result.outlines)


def test_failure_names_the_property_and_shows_the_snippet(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(mine=WRONG_MEAN)
    result = canary(pytester, "--canary", "mine", "-k", "advantage", "-rs")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "*7 * changed the advantages*",
            "*Silent because*",
            "Reproduce:",
            "*load_adapter('mine'),",
        ]
    )


def test_what_is_not_provided_is_counted_and_listed_among_the_skipped_on_request(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(mine=WRONG_MEAN)
    arguments = ("--canary", "mine", "-k", "mask.pad", "-rs")
    result = canary(pytester, *arguments, "--canary-list-not-provided")
    result.stdout.fnmatch_lines(["*needs completion_mask*"])
    result = canary(pytester, *arguments)
    result.stdout.no_fnmatch_line("*needs completion_mask*")
    told = "canary wrong-mean: 0 of 2 checks ran; not checked: mask; provide `completion_mask` to run 2 more"
    result.stdout.fnmatch_lines([told, "*2 not provided*"])


def test_checks_run_under_xdist(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")  # with everything that is installed, as people run it
    result = pytester.runpytest_subprocess("--canary", "reference", "-n", "2", "-k", "mask")
    result.assert_outcomes(passed=len([check for check in all_checks() if "mask" in check.id]))


def test_unknown_adapter_ends_the_session_with_one_line_and_exit_code_2(pytester: pytest.Pytester) -> None:
    result = canary(pytester, "--canary", "nothing_like_it", "-q")
    assert result.ret == 2
    (line,) = (line for line in result.outlines if "nothing_like_it" in line)
    assert "--canary: no adapter" in line


SILENT = """
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.batch import LossOutput

class Silent(ReferenceAdapter):
    name = "silent"

    def policy_loss(self, batch):
        return LossOutput(super().policy_loss(batch).loss, {})
"""


@pytest.mark.parametrize("workers", [(), ("-p", "xdist.plugin", "-n", "1")], ids=["alone", "under xdist"])
def test_what_compared_nothing_is_counted_by_that_name(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    pytester.makepyfile(mine=SILENT)
    run = pytester.runpytest_subprocess if workers else pytester.runpytest_inprocess
    arguments = ("--canary", "mine", "-k", "loss.metrics or loss.row_order")
    result = run("-p", "pytest_rlcanary.conformance", *workers, *arguments)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "*compared nothing*",
            "canary?silent?::loss.metrics: *",
            "*1 passed*1 not compared*",
        ]
    )


def test_expected_findings_are_xfailed_and_others_fail(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(mine=WRONG_MEAN)
    pytester.makeini("[pytest]\ncanary_expected = known.txt\n")
    known = pytester.path / "known.txt"
    chosen = ("--canary", "mine", "-k", "groups_are_separate")
    known.write_text("advantage.groups_are_separate  # on purpose\n    value off by 99\n")
    canary(pytester, *chosen).assert_outcomes(xfailed=1, deselected=len(all_checks()) - 1)
    known.write_text("advantage.groups_are_separate  # on purpose\n    value off by 0.01\n")
    result = canary(pytester, *chosen)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*expected findings: value off*"])
    known.write_text("advantage.shift  # on purpose\n    value off by 9\n")
    result = canary(pytester, "--canary", "mine", "-k", "advantage.shift")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*expected to fail, but passes*"])


def test_check_that_does_not_end_fails_and_the_rest_runs(pytester: pytest.Pytester) -> None:
    endless = WRONG_MEAN.replace("return (rewards", "while True: rewards + 1\n        return (rewards")
    pytester.makepyfile(mine=endless)
    arguments = ("--canary", "mine", "-k", "advantage.shift or mask.pad_id_zero", "--canary-timeout", "1")
    result = canary(pytester, *arguments)
    result.assert_outcomes(failed=1, deselected=len(all_checks()) - 2)
    result.stdout.fnmatch_lines(["*1 not provided*"])
    result.stdout.fnmatch_lines(["*1 s: advantages(?4?, ?4?)*"])


DECLINING = """
from rlcanary.adapters import Adapter, NotProvided

class Declining(Adapter):
    name = "declining"

    def advantages(self, rewards, group_ids):
        raise NotProvided("not in this release")
"""


@pytest.mark.parametrize("options", [(), ("--canary-list-not-provided",)], ids=["counted", "listed"])
def test_a_run_that_compared_nothing_is_no_success(pytester: pytest.Pytester, options: tuple[str, ...]) -> None:
    pytester.makepyfile(mine=DECLINING, test_own="def test_own(): pass")
    result = canary(pytester, "--canary", "mine.py", *options)
    assert result.ret == 2
    result.stdout.fnmatch_lines(["*nothing was checked*"])
    assert canary(pytester, "--canary", "mine.py", "-k", "test_own").ret == 0
