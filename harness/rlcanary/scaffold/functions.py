"""Find the functions of a repository that a capability of an adapter could call, by their names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PATTERNS = {
    "advantages": r"advantage|normali[sz]e_?rewards",
    "policy_loss": r"policy_?loss|(grpo|ppo|actor|pg)_?loss|compute_?loss|loss_?fn|objective|surrogate",
    "token_logprobs": r"log_?prob|logp(s|_|$)",
    "completion_mask": r"(completion|response|action|loss|eos)_?mask",
    "kl": r"(^|_)kl(d|_|$)",
    "entropy": r"entropy",
    "token_advantages": r"(^|_)gae|discounted|(^|_)returns",
    "value_loss": r"(value|critic)_?loss",
    "make_batch": r"collate|make_?batch|pad_(batch|sequences)",
    "keep_group": r"keep_?group|filter_?group|dynamic_?sampling",
    "rollout": r"rollout|generate_?(completions|responses|samples)|sample_?batch|gen_?(samples|answers)",
    "score": r"(compute|score|get)_?rewards?|reward_?(fn|func)",
    "rl_step": r"(update|train|optimi[sz]e)_?(policy|step|batch)|(grpo|ppo)_?step|training_?step",
    "evaluate": r"^eval",
}
"""The words in the names of functions that do what a capability asks for."""

SHOWN = 2
"""The functions that are named for one capability at most."""


@dataclass(frozen=True)
class Function:
    """A function of the repository.

    Attributes:
        file: its file, relative to the repository.
        line: the line of its definition.
        name: its name, with its class in front.
    """

    file: str
    line: int
    name: str

    @property
    def called(self) -> str:
        """The word that says what it does, in lower case: the class's for a call of an object."""
        owner, _, own = self.name.rpartition(".")
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", owner if own in ("forward", "__call__") else own).lower()

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line})"


def functions_by_capability(root: Path, files: Iterable[Path]) -> dict[str, list[Function]]:
    """Return the likely functions of each capability, those of shorter names first; a capability without one is left out.

    Functions of tests, nested ones and those that Python cannot read are left out.
    """
    found: dict[str, list[Function]] = {}
    for file in files:
        name = file.relative_to(root)
        if re.search(r"(^|/)(tests?/|test_|conftest)", name.as_posix()):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
        except (SyntaxError, ValueError):
            continue
        for function in _functions(tree, str(name)):
            for capability, pattern in PATTERNS.items():
                if re.search(pattern, function.called):
                    found.setdefault(capability, []).append(function)
                    break
    return {
        capability: sorted(found[capability], key=lambda each: len(each.name))[:SHOWN]
        for capability in PATTERNS
        if capability in found
    }


def _functions(tree: ast.Module, file: str) -> Iterable[Function]:
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for member in members:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Function(file, member.lineno, f"{owner}{member.name}")
