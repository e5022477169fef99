"""Trains by verl's trainer and workers on the ranks of torchrun, each with rows of its own, and writes what was found."""

import json
import sys
from pathlib import Path

import live_verl
import torch
import torch.distributed as dist

from rlcanary.adapters.verl.adapter import VerlAdapter
from rlcanary.adapters.verl.workers import engine, trainer
from rlcanary.tiny_models import tiny_llama


class Workers(trainer.Workers):
    """The worker of this process, where the adapter has those of all ranks in threads."""

    def __init__(self, store, actor, state, sizes, n_ranks=1):
        super().__init__(store, actor, state, sizes, n_ranks)
        self.states *= dist.get_world_size()

    def _chunks(self, rows):
        several, self.states = self.states, self.states[:1]
        chunks = super()._chunks(rows)
        self.states = several
        return chunks * dist.get_world_size()


def on_this_rank(n_ranks, run):
    with engine._on_cpu():
        return [run(dist.get_rank(), dist.group.WORLD)]


def found():
    """Take a step on rows of this rank -> what each audit found."""
    live_verl.AUDITS.clear()
    torch.manual_seed(0)
    adapter = VerlAdapter({"ppo_mini_batch_size": 1024, "ppo_micro_batch_size_per_gpu": 4, "use_kl_loss": True})
    state = adapter.new_state(tiny_llama().train(), tiny_llama(1), 1e-2)
    adapter.rl_step(state, live_verl.groups(dist.get_rank()), 0)
    return [[str(finding) for finding in audit.findings] for audit in live_verl.AUDITS if audit.audited]


def main():
    dist.init_process_group("gloo")
    from rlcanary.adapters.verl import updates

    updates.Workers, trainer.on_ranks = Workers, on_this_rank
    live_verl.hook.audit_of = live_verl.audit_of
    results = {"none": found()}
    kind = live_verl.transformer_impl.FSDPEngineWithLMHead
    forward_step = kind.forward_step

    def halved(self, *arguments, **options):
        loss, output = forward_step(self, *arguments, **options)
        return loss / 2, output

    kind.forward_step = halved
    results["scaled by accumulation"] = found()
    Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
