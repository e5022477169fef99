"""The user's page of checks, written from their docstrings: `python -m rlcanary.checks.pages > docs/checks.md`."""

from itertools import groupby

from rlcanary.checks.registry import all_checks

HEADER = """# Checks

Every check is a property that holds for each correct implementation, whatever its conventions. This page is written from
the docstrings of the checks by `python -m rlcanary.checks.pages`.
"""


def page() -> str:
    """The page as Markdown: a section per area, an entry per check."""
    parts = [HEADER]
    for area, checks in groupby(all_checks(), key=lambda check: check.area):
        parts.append(f"## {area}\n")
        for check in checks:
            needs = ", ".join(f"`{name}`" for name in check.needs)
            parts.append(f"### {check.id}\n\n{check.explanation}\n\nNeeds {needs}.\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
