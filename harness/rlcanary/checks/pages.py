"""Markdown pages of the checks for users, generated from their docstrings."""

import inspect
from collections.abc import Sequence
from itertools import groupby

from rlcanary.checks.check import Check
from rlcanary.checks.registry import all_checks

INDEX = """# Checks

Every check is a property that holds for each correct implementation, whatever its conventions. Each area has a page that
says for every check why breaking it is silent and where to look. `make docs` writes these pages from the docstrings of
the checks.
"""


def pages() -> dict[str, str]:
    """Return file name -> text: `index.md` with one line per check, and a page per area."""
    by_area = {area: list(checks) for area, checks in groupby(all_checks(), key=lambda check: check.area)}
    index = [INDEX]
    for area, checks in by_area.items():
        index.append(f"## [{area}]({area}.md)\n\n| check | property |\n|---|---|")
        # The anchor of a heading has no dots.
        index += [f"| [{one.id}]({area}.md#{one.id.replace('.', '')}) | {one.summary} |" for one in checks]
        index.append("")
    return {"index.md": "\n".join(index)} | {f"{area}.md": area_page(area, each) for area, each in by_area.items()}


def area_page(area: str, checks: Sequence[Check]) -> str:
    """Return the page of one area: its module's docstring, then every check in full."""
    about = inspect.getdoc(inspect.getmodule(checks[0].run)) or ""
    parts = [f"# {area}\n\n{about.strip()}\n"]
    for check in checks:
        needs = ", ".join(f"`{name}`" for name in check.needs)
        parts.append(f"## {check.id}\n\n{check.explanation}\n\nNeeds {needs}.{_models(check)}\n")
    return "\n".join(parts)


def _models(check: Check) -> str:
    if not check.takes_a_model:
        return ""
    return f" Runs on the [models](../worlds.md) {', '.join(f'`{name}`' for name in ('llama', *check.worlds))}."
