"""A finding says what it does to the update, and a report how much of the suite ran."""

from dataclasses import replace
from pathlib import Path

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import Result, all_checks, run_check
from rlcanary.checks.findings.coverage import coverage
from rlcanary.checks.findings.expected import NO_REASON, changes, compare, read_expected, update_expected
from rlcanary.checks.findings.report import to_markdown
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import LossOutput, PolicyBatch

CHECKS = {check.id: check for check in all_checks()}


class LogsHalf(ReferenceAdapter):
    """Half of the clip fraction, behind a right loss."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        batch.advantages += 0.0
        return LossOutput(output.loss, {"clip_fraction": output.metrics["clip_fraction"] / 2})


class Halves(LogsHalf):
    """Half of the loss as well."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        return LossOutput(output.loss / 2, output.metrics)


class InPlace(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        batch.advantages += 1
        return output


def run(name: str, adapter: Adapter) -> Result:
    return run_check(CHECKS[name], adapter, "mine")


def test_logged_number_is_less_severe_than_a_wrong_update_in_the_same_check() -> None:
    assert run("loss.clipping", LogsHalf()).severity == "dashboard"
    assert run("loss.clipping", Halves()).severity == "update"
    assert run("loss.metrics", LogsHalf()).severity == "dashboard"
    assert run("loss.inputs_untouched", InPlace()).severity == "hardening"
    assert run("loss.clipping", ReferenceAdapter()).severity is None


def test_only_failures_of_the_chosen_severity_or_a_worse_one_are_red() -> None:
    hardening = compare([run("loss.inputs_untouched", InPlace())], {})
    dashboard = compare([run("loss.metrics", LogsHalf())], {})
    update = compare([run("loss.declared_value", Halves())], {})
    least = ("update", "dashboard", "hardening")
    assert [hardening.is_red_from(each) for each in least] == [False, False, True]
    assert [dashboard.is_red_from(each) for each in least] == [False, True, True]
    assert [update.is_red_from(each) for each in least] == [True, True, True]
    assert hardening.is_red_from("hardening")


def test_summary_for_ci_has_the_verdict_of_the_exit_code() -> None:
    results = [run("loss.inputs_untouched", InPlace())]
    checks = [CHECKS["loss.inputs_untouched"]]
    assert to_markdown("mine", checks, results, compare(results, {})).startswith("## ❌")
    assert to_markdown("mine", checks, results, compare(results, {}), least="update").startswith("## ✅")


def test_stale_entry_is_red_at_every_severity(tmp_path: Path) -> None:
    path = tmp_path / "known.txt"
    path.write_text("loss.metrics  # was wrong\n    metric kl off by 1\n")
    assert compare([run("loss.metrics", ReferenceAdapter())], read_expected(path)).is_red_from("update")


def test_coverage_names_the_capability_that_most_checks_wait_for() -> None:
    missing = {
        "b.one": frozenset({"score"}),
        "b.two": frozenset({"kl"}),
        "c.one": frozenset({"kl"}),
        "c.two": frozenset({"kl", "score"}),
        "c.three": frozenset[str](),
    }
    told = coverage(["a.one", *missing], missing)
    assert str(told) == "1 of 6 checks ran; not checked: b, c; provide `kl` to run 2 more"
    both = {"b.one": frozenset({"kl", "score"})}
    assert str(coverage(both, both)) == "0 of 1 checks ran; not checked: b; provide `kl` and `score` to run 1 more"
    assert str(coverage(["a.one"], {})) == "1 of 1 checks ran"


def test_update_tells_what_it_changes_and_keeps_what_did_not_run(tmp_path: Path) -> None:
    path = tmp_path / "known.txt"
    text = "# since May\nloss.metrics  # known\n    value off by 1\nmask.pad_id_zero  # elsewhere\n    value off by 1\n"
    path.write_text(text)
    before = read_expected(path)
    results = [
        run("loss.metrics", LogsHalf()),
        run("mask.pad_id_zero", Adapter()),
        run("loss.row_order", ReferenceAdapter()),
    ]
    after = update_expected(path, results)
    told = changes(before, after)
    assert "removed loss.metrics: value off by 1" in told
    assert any(line.startswith("added loss.metrics: [2, 2]: metric clip_fraction off by 0.5") for line in told)
    assert not [line for line in told if "mask" in line]
    assert "# since May\nloss.metrics  # known\n" in path.read_text()
    assert "mask.pad_id_zero  # elsewhere\n    value off by 1\n" in path.read_text()
    passed = replace(results[0], status="pass", findings=())
    assert all(line.startswith("removed") for line in changes(after, update_expected(path, [passed])))
    assert NO_REASON not in path.read_text()
