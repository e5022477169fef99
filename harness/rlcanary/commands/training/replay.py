"""Judge a recorded update of a run again."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from rlcanary.console import report_console
from rlcanary.errors import UserError
from rlcanary.system.files import make_folder, require_writable, write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.live.findings import Finding
    from rlcanary.live.record import Record

# Tokens of the smallest update that are shown.
SHOWN = 24
BY_LAWS = ", as far as the laws tell that hold for every loss: the run declares none"
IN_ONE = "It was taken in one piece; for the {pieces} micro-batches of the run the adapter needs `accumulated_loss`."
TEST = '''"""Update {number} of a run, of which {rows} rows are left: {invariant}."""

from pathlib import Path

import pytest

from rlcanary.adapters.load import load_adapter
from rlcanary.live import replayed

BUNDLE = Path(__file__).with_name("{bundle}")
ROOT = Path(__file__).parent.joinpath("{root}").resolve()  # where the adapter is found


def test_nothing_is_wrong_with_update_{number}(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(ROOT)
    found = replayed(BUNDLE, load_adapter({adapter}))
    assert not found, str(found[0])
'''


@click.command(
    epilog="Exit codes: 0 nothing is wrong with the update, 1 something is, 2 usage error, 3 internal error."
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--adapter",
    metavar="ADAPTER",
    help="Compute the update with the loss of this adapter, as `rlcanary check` names it.",
)
@click.option(
    "--write-test",
    "test",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a test of the smallest update for --adapter here, and its bundle beside it.",
)
def replay(bundle: Path, adapter: str | None, test: Path | None) -> int:
    """Judge the update in BUNDLE, a folder that the audit of a run wrote.

    The update is shrunk to the fewest rows that show what is wrong. With --adapter the adapter's code computes the update
    anew, and the exit code says whether it is still wrong: `tools/bisect-run.sh` can search on that.
    """
    if test is not None and (adapter is None or test.suffix != ".py" or not test.stem.isidentifier()):
        raise UserError("--write-test needs --adapter, and a file such as tests/test_update.py")
    if test is not None:
        make_folder(test.parent)
        require_writable(test)
    try:
        import torch  # noqa: F401 - asked for here, so that a missing package is named in one line
    except ImportError as error:
        raise UserError(f"replaying needs torch ({error}); pip install 'rlcanary[torch]'") from error
    from rlcanary.adapters.load import load_adapter
    from rlcanary.contract.adapter import provided
    from rlcanary.live import bundle as bundles
    from rlcanary.live.replay import can_be_of, judged, shows_in_its_bundle, shrunk, taken_by

    sys.path.insert(0, str(Path.cwd()))
    code = None if adapter is None else load_adapter(adapter)
    record, told_before = bundles.read(bundle)
    console = report_console()
    are_samples = record.is_rollout and record.advantages is None
    what = "Samples" if are_samples else "Rollout" if record.is_rollout else "Update"
    console.print(
        f"{what} {record.update} of a run, {len(record.mask)} rows. The audit of the run found:", highlight=False
    )
    for line in told_before:
        console.print(f"  {line}", markup=False, highlight=False)
    kinds = [line.partition(":")[0] for line in told_before]
    if code is not None and not any(can_be_of(code, kind) for kind in kinds):
        told = "it has no `advantages`" if "advantages" in kinds else "they are not of the loss"
        raise UserError(f"the adapter cannot be the cause of these findings: {told}; leave --adapter out")
    record = record if code is None else taken_by(code, record)
    found = judged(record, code)
    is_declared = record.is_rollout or record.declares_its_loss
    by = "as it was taken" if adapter is None else f"as {adapter} takes it"
    unseen = [kind for kind in kinds if not shows_in_its_bundle(kind)]
    if not found and code is None and unseen:
        console.print(
            f"This update alone does not show {' and '.join(unseen)} again, which took the evidence of several updates, or "
            "the weights. Nothing else is wrong with it.",
            highlight=False,
        )
        return 1
    if not found:
        console.print(f"Nothing is wrong with the update {by}{'' if is_declared else BY_LAWS}.", highlight=False)
        if code is not None and len(record.pieces) > 1 and "accumulated_loss" not in provided(code):
            console.print(IN_ONE.format(pieces=len(record.pieces)), highlight=False)
        if test is not None:
            console.print(f"{test} is not written: no finding is left to test for.", highlight=False, soft_wrap=True)
        return 0
    console.print(f"Judged again, {by}:", highlight=False)
    for finding in found:
        console.print(f"  {finding.invariant}: {finding.message}", markup=False, highlight=False)
    rows, smallest = shrunk(record, found[0].invariant, code)
    console.print(f"{found[0].invariant} is left with {len(rows)} of {len(record.mask)} rows:", highlight=False)
    tabulate = _samples if are_samples else _rows if record.is_rollout else _tokens
    console.print(tabulate(rows, smallest))
    if test is not None and adapter is not None:
        kept = _write_test(test, adapter, smallest, found[0])
        console.print(f"{test} written, and its bundle {kept}: commit both", highlight=False, soft_wrap=True)
    return 1


def _rows(rows: Tensor, record: Record) -> Table:
    """Tabulate the rows of a rollout."""
    from rlcanary.live.invariants.advantages import declared

    table = Table(*("row", "group", "reward", "advantage", "declared"))
    declared_B = declared(record)
    for place in range(min(len(rows), SHOWN)):
        values = (record.rewards, record.advantages, declared_B)
        told = ["" if each is None else f"{float(each[place].reshape(-1)[0]):.4g}" for each in values]
        group = "" if record.group_ids is None else str(int(record.group_ids[place]))
        table.add_row(str(int(rows[place])), group, *told)
    if len(rows) > SHOWN:
        table.caption = f"and {len(rows) - SHOWN} more rows"
    return table


def _samples(rows: Tensor, record: Record) -> Table:
    """Tabulate the tokens of samples, as trainer and sampler score them."""
    table = Table()
    for name in ("row", "token", "logprob", "sampler's", "entropy"):
        table.add_column(name, justify="right")
    places = record.mask.nonzero().tolist()
    for row, place in places[:SHOWN]:
        values = (record.logprobs, record.sampler_logprobs, record.entropy)
        told = ["" if each is None else f"{float(each[row, place]):.4g}" for each in values]
        table.add_row(str(int(rows[row])), str(place), *told)
    if len(places) > SHOWN:
        table.caption = f"and {len(places) - SHOWN} more tokens"
    return table


def _tokens(rows: Tensor, record: Record) -> Table:
    """Tabulate the trained tokens of an update."""
    from rlcanary.live.invariants.advantages import declared
    from rlcanary.live.invariants.gradient import expected

    table = Table()
    declared_BT, old_BT = expected(record), record.ratio_logprobs
    advantages = record.advantages if record.advantages is not None else declared(record)
    for name in ("row", "token", "logprob", "ratio", "advantage", "gradient", "declared"):
        table.add_column(name, justify="right")
    places = record.mask.nonzero().tolist()
    for row, place in places[:SHOWN]:
        log_ratio = 0.0 if old_BT is None else float(record.logprobs[row, place] - old_BT[row, place])
        of_row = None if advantages is None else advantages[row].reshape(-1)
        advantage = None if of_row is None else of_row[min(place, len(of_row) - 1)]
        table.add_row(
            str(int(rows[row])),
            str(place),
            f"{float(record.logprobs[row, place]):.4g}",
            f"{math.exp(log_ratio):.4g}",
            "" if advantage is None else f"{float(advantage):.4g}",
            f"{float(record.gradient[row, place]):.4g}",
            "" if declared_BT is None else f"{float(declared_BT[row, place]):.4g}",
        )
    if len(places) > SHOWN:
        table.caption = f"and {len(places) - SHOWN} more tokens"
    return table


def _write_test(test: Path, adapter: str, record: Record, finding: Finding) -> Path:
    """Write a test of an update, and its bundle beside it -> the bundle."""
    from rlcanary.live import bundle as bundles

    kept = bundles.write(record, [finding], test.parent, kind=f"{test.stem}_update")
    write_whole(
        test,
        TEST.format(
            number=record.update,
            rows=len(record.mask),
            invariant=finding.invariant,
            bundle=kept.name,
            root=os.path.relpath(Path.cwd(), test.parent.absolute()),
            adapter=json.dumps(adapter),
        ),
    )
    return kept
