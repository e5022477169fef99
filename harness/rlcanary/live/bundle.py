"""A bundle: the folder of an audited update, from which it is judged again without the run."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from rlcanary import __version__
from rlcanary.contract.conventions import Conventions
from rlcanary.errors import UserError
from rlcanary.live.findings import Finding
from rlcanary.live.record import Record

TENSORS, DESCRIPTION = "update.safetensors", "update.json"


def write(record: Record, findings: Sequence[Finding], folder: Path, kind: str = "update") -> Path:
    """Write an update and what was found in it into a folder of bundles -> the bundle.

    A bundle is `update-N`, or another `kind`, with the tensors of the record and `update.json`; one of the same name is
    replaced.

    Raises:
        OSError: the folder cannot be written to.
    """
    from safetensors.torch import save_file

    bundle = folder / f"{kind}-{record.update}"
    partial = folder / f".{bundle.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {
        f"{kind}.{number}": rows
        for kind, several in (("piece", record.pieces), ("part", record.parts))
        for number, rows in enumerate(several)
    }
    settings: dict[str, Any] = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if isinstance(value, Tensor):
            tensors[each.name] = value.contiguous()
        elif each.name not in ("pieces", "parts", "conventions"):
            settings[each.name] = value
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, partial / TENSORS)
    declared = record.conventions
    content = {
        "rlcanary": __version__,
        "findings": [str(finding) for finding in findings],
        "record": settings,
        "conventions": None
        if declared is None
        else {name: _written(value) for name, value in asdict(declared).items()},
    }
    (partial / DESCRIPTION).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(bundle, ignore_errors=True)
    partial.rename(bundle)
    return bundle


def read(bundle: str | Path) -> tuple[Record, list[str]]:
    """Read a bundle -> its record, and what was found in it.

    Raises:
        UserError: the folder is no bundle, or one that this version cannot read.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise UserError("bundles need the safetensors package: pip install safetensors") from error

    bundle = Path(bundle)
    if not (bundle / DESCRIPTION).is_file():
        inside = sorted(each.parent.name for each in bundle.glob(f"*/{DESCRIPTION}"))
        told = f"it holds several: {', '.join(inside)}" if len(inside) > 1 else f"it has no {DESCRIPTION}"
        told = f"did you mean {bundle / inside[0]}?" if len(inside) == 1 else told
        raise UserError(f"{bundle} is no bundle of an update: {told}")
    try:
        content = json.loads((bundle / DESCRIPTION).read_text(encoding="utf-8"))
        tensors = load_file(bundle / TENSORS)
        pieces, parts = _numbered(tensors, "piece"), _numbered(tensors, "part")
        declared = content["conventions"]
        conventions = (
            None if declared is None else Conventions(**{name: _read(each) for name, each in declared.items()})
        )
        record = Record(conventions=conventions, pieces=pieces, parts=parts, **content["record"], **tensors)
        return record, content["findings"]
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise UserError(f"{bundle} cannot be read by rlcanary {__version__}: {error}") from error


def _numbered(tensors: dict[str, Tensor], kind: str) -> list[Tensor]:
    """Take the tensors of a kind out of those of a bundle, in order."""
    count = sum(name.startswith(f"{kind}.") for name in tensors)
    return [tensors.pop(f"{kind}.{number}") for number in range(count)]


def _written(value: Any) -> Any:
    return f"{value.__module__}:{value.__qualname__}" if callable(value) else value


def _read(value: Any) -> Any:
    """Find the function that a convention names."""
    if not isinstance(value, str) or ":" not in value:
        return value
    module, _, name = value.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"the conventions of the bundle name {value}, which cannot be imported here: {error}"
        ) from error
