"""The generated pages and counts are those of the code as it is."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generated_pages_and_counts_are_current() -> None:
    spec = importlib.util.spec_from_file_location("write_docs", ROOT / "tools/write_docs.py")
    assert spec is not None
    assert spec.loader is not None
    write_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_docs)
    files = write_docs.generated()
    stale = [
        str(path.relative_to(ROOT)) for path, text in files.items() if not path.is_file() or path.read_text() != text
    ]
    assert stale == [], "run `make docs`"
    assert set((ROOT / "docs/checks").glob("*.md")) <= files.keys()


def test_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checks/loss/index.html").is_file()


def test_example_of_a_loss_on_logits_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adapters.md").read_text(), re.DOTALL)
    exec(example, {})
