"""Mutate the code behind an adapter and show which mistakes the checks miss."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table
from rich.text import Text

from rlcanary.console import progress_bar, report_console
from rlcanary.errors import UserError
from rlcanary.system.files import require_writable, write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.progress import Progress

    from rlcanary.mutants.killing import Fate, Trial, Verdict

VERDICTS: tuple[Verdict, ...] = ("killed", "survived", "unreached", "crashed", "hung")


@click.command(
    help="""Mutate the code behind an adapter and show which mistakes the checks miss.

    Each mutant is one small mistake in a function that the checks run: another operator, comparison, constant, axis or
    branch, a dropped statement or argument, swapped logprobs or masks, a gradient too many or too few. `--module contract`
    ignores fields, arguments, sampling parameters and declared values instead. The score is the killed share of the mutants
    that run without an error. Reviewed equivalents are left out. Ctrl-C ends early and reports what was judged.
    """,
    epilog="Exit codes: 0 every mutant killed, 1 some survived or no check runs them, 2 usage error, 3 internal error.",
)
@click.option(
    "--adapter",
    "names",
    multiple=True,
    default=("reference", "grpo"),
    show_default=True,
    metavar="NAME",
    help="Mutate the code behind this adapter: reference, grpo, trl, verl or torchrl; repeatable.",
)
@click.option(
    "--module",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="Mutate only this module or package, such as `reference.objective.kl`; repeatable.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="PREFIX",
    help="Judge with the checks whose id starts with PREFIX only, such as `loss.`; repeatable.",
)
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="Draw N mutants at random instead of all.")
@click.option("--seed", default=0, show_default=True, help="Seed of the sample.")
@click.option("--reached", is_flag=True, help="Leave out mutants that no check reaches.")
@click.option("--equivalents", is_flag=True, help="Try the reviewed equivalents instead; all have to survive.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write every verdict here, as JSON.")
@click.option(
    "-n", "--workers", type=click.IntRange(min=1), metavar="N", help="Number of processes; default one per processor."
)
@click.pass_context
def mutants(
    ctx: click.Context,
    names: tuple[str, ...],
    modules: tuple[str, ...],
    only: tuple[str, ...],
    sample: int | None,
    seed: int,
    reached: bool,
    equivalents: bool,
    json_path: Path | None,
    workers: int | None,
) -> None:
    if json_path is not None:
        require_writable(json_path)

    from rlcanary.mutants.equivalents import equivalents as reviewed
    from rlcanary.mutants.gather import drawn
    from rlcanary.mutants.killing import kill
    from rlcanary.mutants.score import to_json

    listed = {entry.id for entry in reviewed()}
    with progress_bar() as progress:
        found = [trial for name in dict.fromkeys(names) for trial in _trials(name, modules, only, progress)]
        counted = [trial for trial in found if trial.runs] if reached else found
        wanted = [trial for trial in counted if trial.mutant.id in listed] if equivalents else counted
        # Drawn before the equivalents are left out: a review of the survivors leaves the sample as it is.
        sampled = drawn(wanted, sample, seed)
        chosen = sampled if equivalents else [trial for trial in sampled if trial.mutant.id not in listed]
        if not chosen:
            raise UserError(f"nothing to mutate in {', '.join(modules) or ', '.join(names)}: no check runs it")
        task = progress.add_task("judging mutants", total=len(chosen))
        judged, is_cut_short = [], False
        try:
            for trial, fate in kill(chosen, workers):
                judged.append((trial, fate))
                progress.advance(task)
        except KeyboardInterrupt:
            is_cut_short = True
    order = {id(trial): index for index, trial in enumerate(chosen)}
    judged.sort(key=lambda each: order[id(each[0])])
    if json_path is not None:
        write_whole(json_path, to_json(judged))
    console = report_console(highlight=False)
    left = ("killed",) if equivalents else ("survived", "unreached")
    _show_mutants(console, [(trial, fate) for trial, fate in judged if fate.verdict in left])
    _show_scores(console, judged)
    left_out = len(sampled) - len(chosen)
    console.print(
        f"{len(judged)} of {len(wanted)} mutants" + (f"; {left_out} equivalents left out" if left_out else "")
    )
    if reached:
        console.print(f"no check reaches {len(found) - len(counted)} others")
    if is_cut_short:
        console.print("interrupted: the others were not judged")
        raise click.Abort
    ctx.exit(1 if any(fate.verdict in left for _, fate in judged) else 0)


def _trials(name: str, modules: Sequence[str], only: tuple[str, ...], progress: Progress) -> list[Trial]:
    from rlcanary.mutants.gather import gather

    task = progress.add_task(f"checking {name}", total=None)

    def tell(check: str, done: int, total: int) -> None:
        progress.update(task, description=f"{name}: {check}", completed=done, total=total)

    found = gather(name, modules, only, tell)
    progress.remove_task(task)
    return found


def _show_mutants(console: Console, judged: Sequence[tuple[Trial, Fate]]) -> None:
    for trial, fate in judged:
        told = f"{fate.verdict} {fate.check}" if fate.check else fate.verdict
        console.print(Text.assemble((trial.mutant.where, "bold"), f" ({trial.name}, {told})"))
        for line in trial.mutant.diff.splitlines():
            color = {"-": "red", "+": "green"}.get(line[:1], "default")
            console.print(Text(f"    {line}", color), soft_wrap=True)


def _show_scores(console: Console, judged: Sequence[tuple[Trial, Fate]]) -> None:
    from rlcanary.mutants.score import scores

    for kind, named in scores(judged).items():
        table = Table(title=f"Mutants by {kind}", title_justify="left")
        table.add_column(kind.capitalize(), no_wrap=True)
        for verdict in (*VERDICTS, "score"):
            table.add_column(verdict.capitalize(), justify="right")
        for name, found in named.items():
            share = "" if found.share is None else f"{100 * found.share:.1f} %"
            table.add_row(name, *(str(found.counts.get(verdict, 0)) for verdict in VERDICTS), share)
        console.print(table)
