"""The numbers and samples that the trainer logs of its rollouts."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.trl import releases
from rlcanary.adapters.trl.base import TrlBase
from rlcanary.adapters.trl.trainer.ranks import Ranks
from rlcanary.adapters.trl.trainer.state import Rollout
from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.records.reporting import LoggedSample, RolloutBatch

# The trainer's names of metrics, and the contract's.
METRICS = {
    "reward": "reward",
    "reward_std": "reward_std",
    "completions/mean_length": "length",
    "completions/min_length": "length_min",
    "completions/max_length": "length_max",
    "completions/clipped_ratio": "truncated",
    "frac_reward_zero_std": "no_signal",
}


class TrlReporting(TrlBase):
    """Numbers and samples that a run logs of its rollouts."""

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        if any(each.finish_reason == "abort" for group in batch.groups for each in group.completions):
            raise NotProvided("the trainer knows no interrupted completions")
        if len(batch.groups) % n_ranks:
            raise NotProvided("ranks have equally many prompts")
        share = len(batch.groups) // n_ranks
        parts = [batch.groups[first : first + share] for first in range(0, len(batch.groups), share)]
        rollouts = [Rollout.of_groups(part) for part in parts]

        def work(rank: int, trainer: Any) -> dict[str, float]:
            own = rollouts[rank]
            trainer.use_vllm, trainer.num_generations = False, own.group_size
            releases.use_ends(trainer, batch.eos_token_ids)
            trainer.replayed = own.outputs(with_logprobs=False)
            trainer.model.train()
            trainer._metrics["train"].clear()
            trainer._generate_and_score_completions(own.inputs())
            return {ours: trainer._metrics["train"][theirs][-1] for theirs, ours in METRICS.items()}

        if len({each.group_size for each in rollouts}) > 1:
            raise NotProvided("groups have to be of equal size and in order")
        with quiet():
            if n_ranks == 1:
                return work(0, self._trainer)
            logged: dict[str, float] = Ranks(n_ranks).run(work, self._trainer)[0]
            return logged

    def logged_samples(self, batch: RolloutBatch, n_samples: int) -> list[LoggedSample]:
        """Have the trainer log its table, whose rows are a whole rollout."""
        import pandas as pd

        from rlcanary.contract.records.reporting import LoggedSample

        rollout = Rollout.of_groups(batch.groups, is_grouped=False)
        if n_samples < len(rollout.rewards):
            raise NotProvided("the table has all completions")
        trainer, texts = self._trainer, [str(each.text) for group in batch.groups for each in group.completions]
        trainer.use_vllm, trainer.num_generations, trainer.log_completions = False, 1, True
        prompts = [str(list(ids)) for ids in rollout.prompt_ids]

        def decoded(rows: Any, **_: Any) -> list[str]:
            """Decode the completions, or, as older releases do, the prompts with their padding on the left."""
            pairs = zip(rows, rollout.prompt_ids, strict=True)
            is_prompts = all(list(map(int, row))[-len(ids) :] == list(ids) for row, ids in pairs)
            return prompts if is_prompts else texts

        trainer.processing_class = SimpleNamespace(batch_decode=decoded)
        trainer.replayed = rollout.outputs(with_logprobs=False)
        trainer.model.train()
        # The log, without its limit of a generation batch.
        trainer._logs = {**trainer._logs, **{name: [] for name in ("prompt", "completion", "advantages")}}
        trainer._logs["rewards"] = {name: [] for name in trainer.reward_func_names}
        trainer.state = copy.copy(trainer.state)
        trainer.state.global_step = batch.step
        rows = [{**row, "prompt": prompt} for row, prompt in zip(rollout.inputs(), prompts, strict=True)]
        with tempfile.TemporaryDirectory() as folder, quiet(), _nothing_printed():
            trainer.args.output_dir = folder
            Path(folder, "completions").mkdir()
            trainer._generate_and_score_completions(rows)
            trainer.log({})
            (file,) = Path(folder, "completions").iterdir()
            table = pd.read_parquet(file)
        known = dict(zip(prompts, rollout.prompt_ids, strict=True))
        (reward,) = trainer.reward_func_names
        return [
            LoggedSample(known[row["prompt"]], row["completion"], float(row[reward]), int(row["step"]))
            for _, row in table.iterrows()
        ]


def _nothing_printed() -> Any:
    """Have the trainer believe that there is no `rich` to print its table with."""
    return patch("trl.trainer.grpo_trainer.is_rich_available", lambda: False)
