import json
from pathlib import Path

DATA = Path(__file__).parent.parent / "data"


def load():
    return json.loads((DATA / "config.json").read_text())
