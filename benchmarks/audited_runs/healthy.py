"""Healthy runs, of which none should have a finding."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from audited_runs.training import PROFILES, Run
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.batch import Group
from rlcanary.contract.state import Item
from rlcanary.live import Audit

KINDS: dict[str, dict[str, Any]] = {
    "one version old": {"lag": 1},
    "low-rank adapters": {"lora": True},
    "engine in bfloat16": {"half": True},
    "four micro-batches": {"pieces": 4},
}


class AllAtOnce(ReferenceAdapter):
    """The reference, with all prompts in one batch of the engine, which takes half the time."""

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        groups = []
        for item, completions in zip(
            items, engine.generate([item.prompt_ids for item in items], sampling), strict=True
        ):
            rewards = self.score([item] * len(completions), [str(each.text) for each in completions]).tolist()
            groups.append(Group(item.prompt_ids, completions, rewards, item_id=item.id, policy_version=engine.version))
        return groups


def healthy(kind: str, seed: int, length: int) -> list[str]:
    """Train without a mistake -> the findings."""
    conventions, _ = PROFILES["micro-batches" if kind == "four micro-batches" else "GRPO"]
    audit = Audit(conventions, every=1, on_finding="log", max_staleness=KINDS[kind].get("lag", 0))
    run = Run(AllAtOnce(conventions), audit, seed=seed, **KINDS[kind])
    while audit.updates < length:
        run.step()
    return [str(finding) for finding in audit.findings]


class Journal:
    """The healthy runs that were done, a JSON line each, so that an interrupted benchmark goes on where it stopped."""

    def __init__(self, path: Path | None, length: int) -> None:
        self._path, self._length = path, length
        self._done: dict[tuple[str, int], list[str]] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                run = json.loads(line)
                if run["updates"] == length:
                    self._done[run["kind"], run["seed"]] = run["findings"]

    def findings(self, kind: str, seed: int) -> list[str]:
        """Return the findings of a run, which is done now if it was not before."""
        if (kind, seed) not in self._done:
            found = self._done[kind, seed] = healthy(kind, seed, self._length)
            if self._path is not None:
                run = {"kind": kind, "seed": seed, "updates": self._length, "findings": found}
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(run) + "\n")
        return self._done[kind, seed]
