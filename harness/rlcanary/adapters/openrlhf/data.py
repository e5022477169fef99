"""OpenRLHF's order of items, and its verifier of final answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import patch

from rlcanary.adapters.openrlhf import run
from rlcanary.adapters.openrlhf.base import OpenrlhfBase
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.records.preparation import Answer


class Data(OpenrlhfBase):
    """Items and answers."""

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        """Return the order of the loader that `SFTTrainer` and the others read, of which each rank has its own part."""
        from openrlhf.utils.deepspeed import deepspeed

        args = self.args()
        strategy = run.strategy_of(args)
        strategy.seed = args.train.seed
        strategy.ds_device_mesh = {"dp": SimpleNamespace(get_group=lambda: None)}
        with (
            patch.object(deepspeed.dist, "is_initialized", lambda: True),
            patch.object(deepspeed.dist, "get_world_size", lambda *_, **__: world_size),
            patch.object(deepspeed.dist, "get_rank", lambda *_, **__: rank),
        ):
            loader = strategy.setup_dataloader(range(n_items), batch_size=1)
        loader.sampler.set_epoch(epoch)
        return list(loader.sampler)

    def verify(self, answer: Answer) -> bool:
        from openrlhf.utils import extract_boxed_answer, grade_answer

        if answer.format != "boxed":
            raise NotProvided("extract_boxed_answer reads \\boxed{}")
        return bool(grade_answer(extract_boxed_answer(answer.text), answer.reference))
