"""Write docs/checks/ from the docstrings of the checks, and the counts in README.md and CHANGELOG.md: `make docs`."""

import re
from pathlib import Path

from rlcanary.bugs import all_bugs
from rlcanary.checks import all_checks
from rlcanary.checks.pages import pages

ROOT = Path(__file__).parents[1]
COUNTS = {r"\d+( properties)": len(all_checks()), r"\d+( silent bugs)": len(all_bugs())}


def generated() -> dict[Path, str]:
    """Every generated file and its text."""
    files = {ROOT / "docs/checks" / name: text for name, text in pages().items()}
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
