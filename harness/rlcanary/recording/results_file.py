"""Results files: their place and their layout, and the names of what lies beside them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcanary.errors import UserError
from rlcanary.recording.json_text import JsonText, json_text, quoted

SCHEMA = 1
RESULTS_NAME = "unit_results.json"
JOURNALS = ".journals"
CONTROLLER = "controller"
OUTCOMES = "outcomes"
LOCK_NAME = "lock"
# Tells a pytest that a test of this run starts, in this process or another one, that this run is alive.
RUN_ID_VARIABLE = "RLCANARY_RUN_ID"


def default_results_file(root: Path, testpaths: Sequence[str]) -> Path:
    """Chooses the place of the results file.

    `tests/unit/unit_results.json` if that folder exists, else the file in the first of pytest's testpaths, else in the
    root.
    """
    folders = [root / "tests" / "unit", *(root / path for path in testpaths[:1])]
    return next((folder for folder in folders if folder.is_dir()), root) / RESULTS_NAME


def history_folder(results_file: Path) -> Path:
    """Returns the folder with a copy of every run: `unit_results/` beside `unit_results.json`.

    Raises:
        UserError: for a file not named .json.
    """
    if results_file.suffix != ".json":
        raise UserError(
            f"the results file {results_file} must end in .json, "
            "because the history lies beside it in a folder of the same name"
        )
    return results_file.with_suffix("")


def require_place(results_file: Path) -> None:
    """Raises UserError for a place that cannot hold a results file, whatever the state of the disk."""
    above = next(path for path in results_file.absolute().parents if path.exists())
    wrong = results_file if results_file.is_dir() else above if not above.is_dir() else None
    if wrong is not None:
        reason = "is a folder" if wrong.is_dir() else "is not a folder"
        raise UserError(
            f"results cannot be written to {results_file} ({wrong} {reason}); "
            "choose another place with --rlcanary-results PATH, or switch them off with -p no:rlcanary-tracker"
        )


def results_text(document: Mapping[str, Any]) -> str:
    """Formats a results file: a line for each key, and for each entry of an object under it.

    An entry may be JSON text already. `json.dumps` with an indent takes ten times as long.

    Raises:
        ValueError: for NaN and infinities.
        TypeError: for a value without a JSON form.
    """
    return "{\n" + ",\n".join(f"  {json_text(key)}: {_spread(value)}" for key, value in document.items()) + "\n}\n"


def _spread(value: Any) -> str:
    if not (isinstance(value, dict) and value):
        return json_text(value)
    lines = [
        f"    {quoted(key)}: {item if isinstance(item, JsonText) else json_text(item)}" for key, item in value.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n  }"
