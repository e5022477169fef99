"""Healthy runs, of which none should have a finding."""

from collections.abc import Mapping
from typing import Any

from audited_runs.training import MAX_TOKENS, PROFILES, ROWS, Run
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
    declared = {"max_staleness": KINDS[kind].get("lag", 0), "rows": ROWS, "max_tokens": MAX_TOKENS}
    audit = Audit(conventions, every=1, on_finding="log", **declared)
    run = Run(AllAtOnce(conventions), audit, seed=seed, **KINDS[kind])
    while audit.updates < length:
        run.step()
    return [str(finding) for finding in audit.findings]
