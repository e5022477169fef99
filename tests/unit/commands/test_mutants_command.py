"""`rlcanary mutants` as it is typed."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rlcanary.commands.checks.mutants import mutants
from rlcanary.errors import UserError
from rlcanary.mutants import killing
from rlcanary.mutants.killing import Fate, Trial


def test_survivors_are_shown_and_every_verdict_is_written(tmp_path: Path) -> None:
    path = tmp_path / "mutants.json"
    arguments = [
        "--adapter",
        "reference",
        "--module",
        "reference.data.filters",
        "--only",
        "filter.",
        "--json",
        str(path),
    ]
    done = CliRunner().invoke(mutants, [*arguments, "-n", "2"])
    document = json.loads(path.read_text())
    verdicts = [mutant["verdict"] for mutant in document["mutants"]]
    assert done.exit_code == (1 if {"survived", "unreached"} & set(verdicts) else 0), done.output
    assert verdicts.count("killed") > 3
    assert {mutant["where"].partition(":")[0] for mutant in document["mutants"]} == {"rlcanary.reference.data.filters"}
    assert document["scores"]["capability"].keys() == {"keep_group"}
    assert document["scores"]["adapter"]["reference"]["killed"] == verdicts.count("killed")
    for mutant in document["mutants"]:
        assert (mutant["where"] in done.output) >= (mutant["verdict"] in ("survived", "unreached"))


def test_mutants_whose_line_no_check_runs_are_left_out_where_wanted() -> None:
    chosen = ["--adapter", "reference", "--module", "reference.objective.advantages", "--only", "advantage.shift"]
    done = CliRunner().invoke(mutants, [*chosen, "--reached", "--sample", "1", "-n", "1"])
    counted = re.search(r"1 of (\d+) mutants.*no check reaches (\d+) others", done.output, re.DOTALL)
    assert counted is not None, done.output
    assert min(map(int, counted.groups())) > 0
    assert "unreached" not in done.output


def test_an_interrupt_reports_what_was_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(trials: Sequence[Trial], workers: int | None) -> Iterator[tuple[Trial, Fate]]:
        yield trials[0], Fate("survived")
        raise KeyboardInterrupt

    monkeypatch.setattr(killing, "kill", interrupted)
    path = tmp_path / "mutants.json"
    arguments = [
        "--adapter",
        "reference",
        "--module",
        "reference.data.filters",
        "--only",
        "filter.",
        "--json",
        str(path),
    ]
    done = CliRunner().invoke(mutants, arguments, standalone_mode=False)
    assert isinstance(done.exception, click.Abort)
    assert [mutant["verdict"] for mutant in json.loads(path.read_text())["mutants"]] == ["survived"]
    assert "interrupted" in done.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--adapter", "other"], "no package is known to mutate behind 'other'"),
        (["--adapter", "reference", "--only", "filtre."], "did you mean filter?"),
        (["--adapter", "reference", "--module", "os", "--only", "filter."], "nothing to mutate in os"),
    ],
)
def test_nothing_to_mutate_is_a_usage_error(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(mutants, arguments)
    assert isinstance(done.exception, UserError)
    assert told in str(done.exception)
