"""A script of several ranks: updates of a small policy under DDP or FSDP, which the audit puts together. Writes JSON."""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rlcanary import reference
from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.presets import DAPO
from rlcanary.live import Audit

EARLY = Audit(DAPO, every=1, on_finding="log", ranks="mean")
"""Made before the processes know each other."""
B, T = 8, 6
MASK = torch.arange(T) < torch.tensor([6, 2, 4, 5, 1, 3, 6, 2]).unsqueeze(1)
REWARDS = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0])
GROUPS = torch.arange(B) // 4


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(B, T, 5, generator=torch.Generator().manual_seed(0)))
        self.frozen = nn.Parameter(torch.zeros(B), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.logits[rows].log_softmax(-1)[..., 0] + 0 * self.frozen[rows].unsqueeze(1)


def run(sharding: str, mistake: str, folder: Path) -> dict[str, object]:
    """Take three updates -> what the audit found."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([1]) if mistake == "trainer on rank 1" else None
    if group and rank == 0:
        return {"found": [], "audited": 0}
    is_alone = group is not None or mistake == "separate"
    world = 1 if is_alone else dist.get_world_size()
    policy = Table()
    if is_alone:
        model: nn.Module = policy
    elif sharding == "fsdp":
        model = policy = fully_shard(policy, mesh=init_device_mesh("cpu", (world,)))
        assert policy.logits.to_local().shape[0] == B // world
    else:
        model = nn.parallel.DistributedDataParallel(policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    advantages = reference.advantages(REWARDS, GROUPS, DAPO)
    bundles = folder / sharding / mistake
    ranks = "separate" if mistake == "separate" else "mean"
    audit = Audit(DAPO, every=1, on_finding="log", ranks=ranks, bundles=bundles, group=group)
    if mistake == "audit before the group":
        audit = EARLY
    rows = torch.arange(B).tensor_split(dist.get_world_size())[rank]
    for number in range(3):
        optimizer.zero_grad()
        given = {"rewards": REWARDS[rows], "group_ids": GROUPS[rows], "advantages": advantages[rows]}
        if mistake == "audit" and rank == 1 and number == 1:
            given["rewards"] = "not a tensor"
            given["unknown"] = 1
        if mistake == "old logprobs first":
            with torch.no_grad():
                model(rows)  # which leaves the root of a sharded model whole until its next backward pass
        with audit.update(mask=MASK[rows], model=policy, **given) as update:
            logprobs = model(rows) if mistake == "not watched" else update.watch(model(rows))
            batch = PolicyBatch(logprobs, logprobs.detach(), advantages[rows], MASK[rows])
            if mistake != "means of ranks":
                batch.global_tokens = float(MASK[rows].sum() if is_alone else MASK.sum()) / world
            reference.policy_loss(batch, DAPO).loss.backward()
            if mistake in ("frozen part", "trainer on rank 1", "separate"):
                with torch.no_grad():
                    policy.frozen += 1 if mistake == "separate" else rank  # on one rank alone
            optimizer.step()
        if mistake == "rollout" and number == 0:
            wrong = 2 * advantages[rows] if rank else advantages[rows]
            audit.on_finding = "warn"
            audit.rollout(mask=MASK[rows], rewards=REWARDS[rows], group_ids=GROUPS[rows], advantages=wrong)
            audit.on_finding = "log"
    return {"found": [str(finding) for finding in audit.findings], "audited": audit.audited}


def main(folder: Path, runs: list[str]) -> None:
    dist.init_process_group("gloo")
    results = {}
    for name in runs:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results[name] = run(*name.split("/"), folder)
        told = [str(each.message) for each in caught]
        results[name]["told"] = [line for line in told if line.startswith("rlcanary: ")]
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()  # a rank that ends with its threads at work can abort


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
