"""Bugs in the updates on a rollout."""

from typing import Any

from torch import Tensor

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import Group


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
