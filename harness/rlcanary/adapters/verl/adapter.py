"""verl as an adapter: its default trainer, workers, agent loops and datasets, on one CPU with tiny models.

The engine is the FSDP one without FSDP: its methods run as they are, with a given model, or with given logprobs in place of
a model's output. Written for verl 0.9; older releases and the development tree of 0.10 run, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcanary.adapters.algorithms import algorithms_of
from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.verl.conversations import Conversations
from rlcanary.adapters.verl.rewards import shaped_rewards
from rlcanary.adapters.verl.workers.transfer_queue import stored, trainer_module

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from rlcanary.contract.adapter import Adapter
    from rlcanary.contract.records.lengths import Lengths


class VerlAdapter(Conversations):
    """Adapter of verl under some settings, by default its own with the GRPO advantage estimator."""

    def configurations(self) -> Mapping[str, Adapter]:
        """Return the algorithms that settings choose, and corrections for the sampler."""
        corrections = {
            f"{level}-{mode}": self.configured(importance_level=level, importance_mode=mode)
            for level, mode in (("token", "truncate"), ("sequence", "truncate"))
        }
        return {**algorithms_of(self), "kl": self.configured(kl_coef=0.05), **corrections}

    def shape_rewards(self, rewards: Tensor, lengths: Lengths) -> Tensor:
        return shaped_rewards(rewards, lengths, self.overlong_buffer)

    def keep_group(self, rewards: Tensor) -> bool:
        """Decide as `filter_groups` does when enabled with the metric `reward`."""
        trainer_module()
        from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

        keys = [f"group_{index}_0" for index in range(len(rewards))]
        with stored() as store, quiet():
            # Up to 0.9 the metric `reward` is the sum of the scores; from 0.10 on it is in what a reward function returns.
            store.rows = {
                key: {
                    "rm_scores": reward.view(1),
                    "extra_fields": {"reward_extra_info": {"reward": reward.item()}},
                }
                for key, reward in zip(keys, rewards, strict=True)
            }
            buffer = ReplayBuffer(
                trainer_mode="sync",
                trainer_config=None,
                max_off_policy_threshold=1,  # version of the weights; None is refused from 0.10 on
                max_off_policy_strategy="drop",
                sampler_kwargs=None,
                refill_fn=lambda _: None,
                filter_groups_metric="reward",
            )
            buffer.partitions["train"] = {key: {} for key in keys}
            buffer.finished_keys["train"] = {"group"}
            filtered, _ = buffer._dapo_filtered_keys("train")
        return "group" not in filtered
