"""A configuration of flat names: what is written is used, and what cannot be used is refused."""

import copy
from collections.abc import Mapping
from typing import Any

from rlcanary.contract.records.preparation import Setting

SETTINGS = (
    Setting("optimizer.learning_rate", (1e-6, 0.0)),
    Setting("optimizer.betas", ([0.9, 0.95], [0.0, 0.0])),
    Setting("optimizer.max_grad_norm", (1.0, None)),
    Setting("sampling.temperature", (0.7, 0.0)),
    Setting("sampling.max_tokens", (1024, 16)),
    Setting("sampling.stop", (["</answer>"], [])),
    Setting("evaluation.temperature", (0.6, 0.0)),
    Setting("evaluation.max_tokens", (2048,), derived_from=("sampling.max_tokens",)),
    Setting("evaluation.stop", (["####", "\n\n"], []), derived_from=("sampling.stop",)),
    Setting("tools.max_calls", (4, 0)),
    Setting("tokenizer.revision", ("v1.1", "")),
    Setting("run.note", ("a first try", "")),
    Setting("run.resume", (True, False)),
)
DEFAULTS: Mapping[str, Any] = {
    "optimizer.learning_rate": 3e-6,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.max_grad_norm": 0.5,
    "sampling.temperature": 1.0,
    "sampling.max_tokens": 512,
    "sampling.stop": ["<end>"],
    "evaluation.temperature": 0.2,
    "tools.max_calls": 8,
    "tokenizer.revision": "main",
    "run.note": "none",
    "run.resume": True,
}
DERIVED: Mapping[str, str] = {
    "evaluation.max_tokens": "sampling.max_tokens",
    "evaluation.stop": "sampling.stop",
}
OPTIONAL = ("optimizer.max_grad_norm",)


def effective(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each setting: the one that is written, else its default. No two results share a list.

    A number may be written as text.

    Raises:
        ValueError: there is no such setting, or a text is not the number that belongs there.
        TypeError: a value of another type, such as the text "False" for a truth value.
    """
    if unknown := sorted(set(written) - {*DEFAULTS, *DERIVED}):
        raise ValueError(f"no setting {', '.join(unknown)}")
    used = copy.deepcopy({**DEFAULTS, **{name: _parsed(name, value) for name, value in written.items()}})
    for name, source in DERIVED.items():
        used.setdefault(name, copy.deepcopy(used[source]))
    return used


def _parsed(name: str, value: Any) -> Any:
    """Convert a value to the type of the setting's default."""
    default = DEFAULTS[DERIVED.get(name, name)]
    if value is None and name in OPTIONAL:
        return None
    if isinstance(default, int | float) and not isinstance(default, bool) and isinstance(value, str):
        return type(default)(value)
    kinds = (float, int) if isinstance(default, float) else (type(default),)
    if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(default, bool)):
        raise TypeError(f"{name}={value!r} is not a {type(default).__name__}")
    return value
