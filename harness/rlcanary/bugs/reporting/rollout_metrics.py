"""Bugs in the metrics of rollouts."""

from dataclasses import replace
from statistics import fmean

from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import Completion
from rlcanary.contract.records.reporting import RolloutBatch


class RewardsOfAllRanksZipped(Bug):
    id = "slime.rewards-of-all-ranks-zipped"
    source = "slime c1dd9ab24, #2234, survey L30"
    effect = "metrics of correct samples are those of other samples as soon as there are two ranks"

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        # Each rank has every n-th group, and the rewards of all.
        of_ranks = [group for rank in range(n_ranks) for group in batch.groups[rank::n_ranks]]
        completions = [completion for group in of_ranks for completion in group.completions]
        rewards = [reward for group in batch.groups for reward in group.rewards]
        zipped = zip(completions, rewards, strict=True)
        right = [len(each.token_ids) for each, reward in zipped if reward >= self.conventions.pass_threshold]
        metrics = super().rollout_metrics(batch, n_ranks)
        return {**metrics, "length_right": fmean(right)} if right else metrics


class TruncatedOverLocalCount(Bug):
    id = "trl.truncated-over-local-count"
    source = "TRL c13de6f9c, #3506, survey T10"
    effect = (
        "completions that ended on all ranks are divided by the completions of one: the truncated share is negative"
    )

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        metrics = super().rollout_metrics(batch, n_ranks)
        share = sum(len(group.completions) for group in batch.groups[::n_ranks])
        every = sum(len(group.completions) for group in batch.groups)
        return metrics | {"truncated": 1 - (1 - metrics["truncated"]) * every / share}


class RewardOncePerTurn(Bug):
    id = "molt.reward-once-per-turn"
    source = "NeMo molt, #64"
    effect = "a rollout counts once per turn: failures, which take the most turns, pull the logged reward down"

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        groups = []
        for group in batch.groups:
            rows = zip(group.completions, group.rewards, strict=True)
            repeated = [(completion, reward) for completion, reward in rows for _ in range(_turns(completion))]
            completions, rewards = zip(*repeated, strict=True)
            groups.append(replace(group, completions=completions, rewards=rewards))
        weighted = super().rollout_metrics(replace(batch, groups=groups), n_ranks)
        return super().rollout_metrics(batch, n_ranks) | {"reward": weighted["reward"]}


def _turns(completion: Completion) -> int:
    """Count the runs of tokens that the policy sampled."""
    marks = list(completion.sampled or [True])
    return sum(is_own and not before for before, is_own in zip([False, *marks], marks, strict=False))


class LettersCounted(Bug):
    id = "skyrl.letters-counted"
    source = "SkyRL 390ad076c, #764, survey S21"
    effect = "batched generation counts the letters of a completion's text, not its tokens"

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        groups = [replace(group, completions=list(map(_letters, group.completions))) for group in batch.groups]
        counted = super().rollout_metrics(replace(batch, groups=groups), n_ranks)
        lengths = {name: value for name, value in counted.items() if name.startswith("length")}
        return super().rollout_metrics(batch, n_ranks) | lengths


def _letters(completion: Completion) -> Completion:
    return replace(completion, token_ids=[0] * len(completion.text or ""), sampled=None)


class OnlyKeptGroups(Bug):
    id = "slime.only-kept-groups"
    source = "slime f80bc3923, #1410, survey L35"
    effect = "what is said of all samples is of those that dynamic sampling kept: no group is without a signal"

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        kept = [group for group in batch.groups if max(group.rewards) > min(group.rewards)]
        return super().rollout_metrics(replace(batch, groups=kept or batch.groups), n_ranks)


class LongestCountsAsTruncated(Bug):
    id = "verl.longest-counts-as-truncated"
    source = "verl, #7817, #7821"
    effect = (
        "lengths are compared with the width of the batch: some completion is always truncated, and none where all are"
    )

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        lengths = [len(completion.token_ids) for group in batch.groups for completion in group.completions]
        longest = sum(length == max(lengths) for length in lengths)
        return super().rollout_metrics(batch, n_ranks) | {"truncated": longest / len(lengths)}


class EmptyEpisodesNotCounted(Bug):
    id = "rllm.empty-episodes-not-counted"
    source = "rLLM e9be9ec6"
    effect = "episodes that ended before their first token are in no denominator: the reward is that of the others"

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        groups = []
        for group in batch.groups:
            whole = [pair for pair in zip(group.completions, group.rewards, strict=True) if pair[0].token_ids]
            if whole:
                completions, rewards = map(list, zip(*whole, strict=True))
                groups.append(replace(group, completions=completions, rewards=rewards))
        return super().rollout_metrics(replace(batch, groups=groups or batch.groups), n_ranks)
