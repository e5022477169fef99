"""Bugs in the updates on a rollout."""

from statistics import fmean
from typing import Any

from torch import Tensor

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import Group
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO


class TruncatedTokensCounted(Bug):
    id = "trl.truncated-tokens-counted"
    source = "TRL 7c1fa85ad, #6439"
    effect = "the loss is divided by the tokens of all completions, those of truncated ones that are masked included"

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        conventions, declared = self.conventions, self.conventions
        if declared.aggregation == "token_mean":
            tokens = sum(len(completion.token_ids) for group in groups for completion in group.completions)

            def over_all_tokens(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
                return values_BT.masked_fill(~mask_BT.bool(), 0).sum() * declared.mini_batches / tokens

            conventions = declared.replace(aggregation=over_all_tokens)
        return reference.rl_step(state, self.make_batch(groups, pad_token_id), conventions)


class MetricsNeverCleared(Bug):
    id = "ms-swift.metrics-never-cleared"
    source = "ms-swift 1a7977b7f"
    effect = "the logged reward, KL and clip fraction are means over all rollouts since the start"

    def __init__(self, conventions: Conventions = GRPO) -> None:
        super().__init__(conventions)
        self._logged: dict[int, tuple[Any, dict[str, list[float]]]] = {}

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        metrics = super().rl_step(state, groups, pad_token_id)
        _, values = self._logged.setdefault(id(state), (state, {}))
        for name in {"reward", "kl", "clip_fraction", "entropy"} & metrics.keys():
            values.setdefault(name, []).append(metrics[name])
        return metrics | {name: fmean(each) for name, each in values.items()}
