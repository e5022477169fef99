"""The record of a launch in its folder, from which its jobs can be judged and cancelled later."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlcanary.errors import UserError
from rlcanary.launch.experiment import Experiment
from rlcanary.launch.suite import Configuration
from rlcanary.system.files import write_whole

NAME = "launch.json"


@dataclass(frozen=True)
class Record:
    experiment: Experiment
    executor: str
    address: str
    """The address of the executor's cluster. Empty if it is this machine's default."""
    ids: Sequence[str]
    """The ids of the jobs, one per run."""

    def write(self) -> None:
        own = self.experiment
        document: dict[str, Any] = {
            "script": own.script,
            "launched": own.launched,
            "executor": self.executor,
            "address": self.address,
            "jobs": list(self.ids),
            "snapshot": str(own.snapshot),
            "python_path": own.python_path,
            "configuration": asdict(own.configuration),
        }
        write_whole(own.folder / NAME, json.dumps(document, indent=1) + "\n")


def read_record(folder: Path) -> Record:
    """Read the record of a launch.

    Raises:
        UserError: The folder was not written by a launch.
    """
    place = folder.absolute()
    try:
        document = json.loads((place / NAME).read_text(encoding="utf-8"))
        experiment = Experiment(
            document["script"],
            Configuration(**document["configuration"]),
            Path(document["snapshot"]),
            document["python_path"],
            place,
            document["launched"],
        )
        return Record(experiment, document["executor"], document["address"], document["jobs"])
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{folder} is not a launch: name a folder that `rlcanary launch` printed, one with a {NAME}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / NAME} cannot be read: {error!r}") from None


def find_launches(folder: Path) -> Iterator[Path]:
    """List the folders of launches in `folder`."""
    return (file.parent for file in folder.glob(f"*/{NAME}"))
