"""Discovery of the checks in the folders of `areas/`."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Sequence
from difflib import get_close_matches

from rlcanary.checks import areas
from rlcanary.checks.check import Check
from rlcanary.errors import UserError

SHOWN = 6
"""The areas that are named at most where a word is no area."""

# The order of the report, by module: an area is one, or several beside each other whose names start with it. A module that
# is not named here comes after them, by name.
READING_ORDER = (
    "logprob",
    "forward",
    "entropy",
    "mask",
    "advantage",
    "credit",
    "loss",
    "value",
    "kl",
    "importance",
    "gradient",
    "split",
    "split_other",
    "config",
    "supervised",
    "distillation",
    "preference",
    "batch",
    "eos",
    "reward",
    "verifying",
    "rollout",
    "rollout_versions",
    "rollout_interrupted",
    "seed",
    "rendering",
    "conversation",
    "preparing",
    "order",
    "filter",
    "overlong",
    "schedule",
    "buffer",
    "staleness",
    "step",
    "step_movement",
    "rl_step",
    "metrics",
    "checkpoint",
    "evaluation",
    "evaluation_plan",
    "evaluation_metrics",
    "rollout_metrics",
    "merged_metrics",
    "logged_samples",
    "sync",
    "sync_contents",
    "parity",
    "settings",
    "building",
    "plan",
    "sharding",
    "layout_scale",
    "vocab_parallel",
    "routing",
)


def all_checks() -> list[Check]:
    """Return every check of the modules in the folders of `areas/`, by area and in the order of its module."""
    walked = pkgutil.walk_packages(areas.__path__, f"{areas.__name__}.")
    found = {module.name.rpartition(".")[2]: module.name for module in walked if not module.ispkg}
    names = [*(name for name in READING_ORDER if name in found), *sorted(found.keys() - set(READING_ORDER))]
    modules = [importlib.import_module(found[name]) for name in names]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Check)]


def checks_of(prefixes: Sequence[str]) -> list[Check]:
    """Return the checks whose id starts with one of these, as `--only` takes them; all without any.

    Args:
        prefixes: beginnings of ids, several of them also in one text, separated by commas.

    Raises:
        UserError: none starts with one of them, or all are empty.
    """
    checks = all_checks()
    starts = [each.strip().removesuffix("*") for prefix in prefixes for each in prefix.split(",") if each.strip()]
    if prefixes and not starts:
        raise UserError("no beginning of an id is given: name one, such as loss. or loss,step")
    for start in starts:
        if not any(each.id.startswith(start) for each in checks):
            raise UserError(f"no check starts with {start}: {_meant(start, checks)}")
    return [each for each in checks if not starts or each.id.startswith(tuple(starts))]


def _meant(start: str, checks: Sequence[Check]) -> str:
    """Say what could be meant: a similar name, and the areas whose checks speak of the word; where none is, any area."""
    areas = list(dict.fromkeys(each.area for each in checks))
    word = start.partition(".")[0]
    if word in areas:
        close, about = get_close_matches(start, [each.id for each in checks], n=1), []
    else:
        close, named = get_close_matches(word, areas, n=1), re.compile(rf"\b{re.escape(word)}", re.IGNORECASE)
        about = list(dict.fromkeys(each.area for each in checks if named.search(f"{each.id} {each.explanation}")))
    told = [f"did you mean {close[0]}?"] if close else []
    told += [f"checks of {', '.join(about[:SHOWN])} speak of it"] if about else []
    return " ".join(told) or f"the areas are {', '.join(areas)}"
