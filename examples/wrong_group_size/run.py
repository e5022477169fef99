"""Train with advantages over groups of a wrong size: does a run's own check of its metrics see it, and do rlcanary's?

`python run.py twice` plants one of GROUPS into the bundled trainer, which has the right ones.
"""

import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from rlcanary import CollatedBatch, PolicyBatch, load_adapter
from rlcanary.checks import all_checks, run_check
from rlcanary.grpo.plan.reading import read_plan
from rlcanary.grpo.train import train
from rlcanary.grpo.training import trainer
from rlcanary.live.audit import Audit
from rlcanary.run_metrics.expression import Check

TESTS = Path(__file__).parents[2] / "tests/functional"
CHECKED = ("step.declared_gradient", "rl_step.declared_gradients")


def right(ids_B: torch.Tensor) -> torch.Tensor:
    """The groups as they are."""
    return ids_B


def twice(ids_B: torch.Tensor) -> torch.Tensor:
    """Two prompts in one group: a group size that is twice the number of completions."""
    return ids_B // 2


def half(ids_B: torch.Tensor) -> torch.Tensor:
    """Two groups for each prompt."""
    is_own_BB = ids_B.unsqueeze(0) == ids_B.unsqueeze(1)
    place_B = is_own_BB.tril(-1).sum(dim=1)
    return 2 * ids_B + (2 * place_B >= is_own_BB.sum(dim=1)).long()


def batch(ids_B: torch.Tensor) -> torch.Tensor:
    """The whole batch as one group."""
    return torch.zeros_like(ids_B)


GROUPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    each.__name__: each for each in (right, twice, half, batch)
}


def planted(regrouped: Callable[[torch.Tensor], torch.Tensor]) -> mock._patch:
    """Let the trainer take its advantages over these groups."""
    original = trainer.with_advantages

    def wrong(batch: CollatedBatch, *others: object) -> PolicyBatch:
        return original(replace(batch, group_ids=regrouped(batch.group_ids)), *others)

    return mock.patch.object(trainer, "with_advantages", wrong)


def metric_checks() -> list[Check]:
    """The checks of the functional test of this plan, as its script has them."""
    script = shlex.split((TESTS / "grpo.sh").read_text(), comments=True)
    return [Check(word) for word in script[script.index("check-metrics") + 2 :] if re.search("[<>]", word)]


def judged(name: str) -> tuple[float, str, str, str]:
    """Train, and judge -> the reward of the last five steps, and what metric checks, audit and conformance checks say."""
    logged: dict[str, dict[str, float]] = {}

    def on_step(step: int, metrics: dict[str, float]) -> None:
        for metric, value in metrics.items():
            logged.setdefault(metric, {})[str(step)] = value

    with tempfile.TemporaryDirectory() as folder, planted(GROUPS[name]):
        plan = read_plan(TESTS / "grpo.yaml", [f"run.folder={folder}/run"])
        audit = Audit(plan.conventions, every=plan.run.audit_every, on_finding="log", bundles=Path(folder) / "canary")
        train(plan, on_step=on_step, audit=audit)
        adapter = load_adapter("grpo")
        results = [run_check(each, adapter, "grpo") for each in all_checks() if each.id in CHECKED]
    metrics = [check.on(logged).passed for check in metric_checks()]
    found = sorted({finding.invariant for finding in audit.findings})
    failed = [result.id for result in results if result.status == "fail"]
    reward = sum(list(logged["reward"].values())[-5:]) / 5
    return (
        reward,
        f"{sum(metrics)} of {len(metrics)} pass",
        ", ".join(found) or "no finding",
        ", ".join(failed) or "pass",
    )


if __name__ == "__main__":
    print("| groups | reward at the end | checks of the run's metrics | audit of the run | conformance checks |")
    print("|---|---|---|---|---|")
    for name in sys.argv[1:] or GROUPS:
        reward, *verdicts = judged(name)
        print(f"| {name} | {reward:.2f} | {' | '.join(verdicts)} |")
