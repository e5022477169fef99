"""Write the generated docs: docs/checks/, docs/contract.md, and the counts in README.md and CHANGELOG.md."""

import inspect
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from rlcanary.bugs import all_bugs
from rlcanary.checks import all_checks
from rlcanary.checks.pages import pages
from rlcanary.contract.adapter import TrainState
from rlcanary.contract.conventions import PIECES, Conventions, choices
from rlcanary.contract.presets import CREDIT_PAPERS, PAPERS
from rlcanary.contract.records import RECORDS
from rlcanary.contract.sampling import Sampling

ROOT = Path(__file__).parents[1]
COUNTS = {r"\d+( properties)": len(all_checks()), r"\d+( silent bugs)": len(all_bugs())}


CONTRACT = """# Conventions and records

`from rlcanary import Conventions, Completion, Group, …` gives all of these. `make docs` writes this page
from their docstrings.

## Conventions

What an adapter declares about its code. A preset is a start: `PRESETS["dapo"].replace(kl_coef=0.01)`.
Presets of papers: {papers}.
"""


# The first field of each part of the conventions.
PARTS = {
    "advantage_baseline": "Rewards and advantages",
    "objective": "Policy loss",
    "kl_estimator": "KL and entropy",
    "logprobs_upcast": "Scoring and updates",
    "importance_level": "Correction for the sampler",
    "evaluation_temperature": "Evaluation, weight sync and data",
    "epochs_per_rollout": "RL step",
    "logged_std": "Logged numbers",
    "supervised_aggregation": "Other losses",
    "token_credit": "Credit per token and critics",
    "buffer_order": "Buffer between sampler and trainer",
    "answer_taken": "Verifiers and datasets",
    "decayed": "Start of a run",
}


def attributes(record: type[Any]) -> dict[str, str]:
    """Read the descriptions under `Attributes:` in the docstring of a record."""
    section = (inspect.getdoc(record) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def default_of(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return f"`{field.default!r}`"
    return "" if field.default_factory is MISSING else f"`{field.default_factory()!r}`"


def table(record: type[Any]) -> str:
    """Make a table of a dataclass's fields: name, default, meaning."""
    told = attributes(record)
    head = ["| field | default | meaning |", "|---|---|---|"]
    lines = [] if record is Conventions else head
    for field in fields(record):
        if record is Conventions and field.name in PARTS:
            lines += [*([""] if lines else []), f"### {PARTS[field.name]}", "", *head]
        words = " ".join(f"`{value!r}`" for value in (choices(field.name) if record is Conventions else ()))
        custom = ', `"custom"` or a function' if field.name in PIECES else ""
        meaning = told.get(field.name, "") + (f" One of {words}{custom}." if words else "")
        lines.append(f"| `{field.name}` | {default_of(field)} | {meaning} |")
    return "\n".join(lines) + "\n"


def contract_page() -> str:
    """Describe every convention and every record of the adapter contract."""
    parts = [CONTRACT.format(papers=", ".join(f"`{name}`" for name in PAPERS | CREDIT_PAPERS)), table(Conventions)]
    for record in (*RECORDS, TrainState, Sampling):
        summary = (inspect.getdoc(record) or "").partition("\n")[0]
        parts.append(f"\n## {record.__name__}\n\n{summary}\n\n{table(record)}")
    return "\n".join(parts)


def generated() -> dict[Path, str]:
    """Return every generated file and its text."""
    files = {ROOT / "docs/checks" / name: text for name, text in pages().items()}
    files[ROOT / "docs/contract.md"] = contract_page()
    for name in ("README.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for pattern, count in COUNTS.items():
            text = re.sub(pattern, rf"{count}\1", text)
        files[ROOT / name] = text
    return files


def main() -> None:
    files = generated()
    (ROOT / "docs/checks").mkdir(exist_ok=True)
    for stale in set((ROOT / "docs/checks").glob("*.md")) - files.keys():
        stale.unlink()
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
