"""A script of several ranks: updates of a small policy under DDP, which the audit puts together. Prints findings as JSON."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from rlcanary import reference
from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.presets import DAPO
from rlcanary.live import Audit

B, T = 8, 6
MASK = torch.arange(T) < torch.tensor([6, 2, 4, 5, 1, 3, 6, 2]).unsqueeze(1)
REWARDS = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0])
GROUPS = torch.arange(B) // 4


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(B, T, 5, generator=torch.Generator().manual_seed(0)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.logits[rows].log_softmax(-1)[..., 0]


def main(mistake: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    policy = Table()
    model = nn.parallel.DistributedDataParallel(policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    advantages = reference.advantages(REWARDS, GROUPS, DAPO)
    audit = Audit(DAPO, every=1, on_finding="log", ranks="mean", bundles=folder)
    rows = torch.arange(B).tensor_split(world)[rank]
    for number in range(3):
        optimizer.zero_grad()
        given = {"rewards": REWARDS[rows], "group_ids": GROUPS[rows], "advantages": advantages[rows]}
        if mistake == "audit" and rank == 1 and number == 1:
            given["rewards"] = "not a tensor"
            given["unknown"] = 1
        with audit.update(mask=MASK[rows], model=policy, **given) as update:
            logprobs = update.watch(model(rows))
            batch = PolicyBatch(logprobs, logprobs.detach(), advantages[rows], MASK[rows])
            if mistake != "means of ranks":
                batch.global_tokens = float(MASK.sum()) / world
            reference.policy_loss(batch, DAPO).loss.backward()
            optimizer.step()
    (folder / f"rank-{rank}.json").write_text(
        json.dumps({"found": [str(finding) for finding in audit.findings], "audited": audit.audited})
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
