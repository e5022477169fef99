"""The numbers that a run logs of its rollouts and evaluations, and their reduction over parts.

Definitions: pass@k is the unbiased estimate of arXiv 2107.03374 (eq. 1), best@k its counterpart for graded scores.
"""

import math
from collections import Counter
from collections.abc import Sequence

from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.reporting import EvaluatedItem, LoggedSample, Metric, RolloutBatch


def rollout_metrics(batch: RolloutBatch, conventions: Conventions) -> dict[str, float]:
    """Compute the metrics of rollouts that `Adapter.rollout_metrics` names.

    Args:
        batch: at least one group.
        conventions: logged_std, logged_std_ddof, logged_length, length_counts_eos, unscored and pass_threshold are used.

    Returns:
        The metrics by name. Those of rewards are over completions and groups with a reward; a metric of no completion, such
        as `length_right` without a right one, is left out.

    Raises:
        ValueError: a reward is NaN and `unscored` is "error".
    """
    completions = [completion for group in batch.groups for completion in group.completions]
    lengths = [_length(completion, batch.eos_token_ids, conventions) for completion in completions]
    reasons = Counter(completion.finish_reason for completion in completions)
    stale = [batch.trainer_version - group.policy_version for group in batch.groups for _ in group.completions]
    metrics = {
        "length": _mean(lengths),
        "length_min": min(lengths),
        "length_max": max(lengths),
        "stopped": reasons["stop"] / len(completions),
        "truncated": reasons["length"] / len(completions),
        "aborted": reasons["abort"] / len(completions),
        "staleness": _mean(stale),
        "staleness_max": max(stale),
    }
    every_reward = [reward for group in batch.groups for reward in group.rewards]
    right = [length for length, reward in zip(lengths, every_reward, strict=True) if _is_right(reward, conventions)]
    if right:
        metrics["length_right"] = _mean(right)
    return metrics | _reward_metrics(batch.groups, conventions)


def _reward_metrics(groups: Sequence[Group], conventions: Conventions) -> dict[str, float]:
    scored = [(group.dataset, scores(group.rewards, conventions)) for group in groups]
    scored = [(dataset, rewards) for dataset, rewards in scored if rewards]
    every = [reward for _, rewards in scored for reward in rewards]
    if not every:
        return {}
    right = [[_is_right(reward, conventions) for reward in rewards] for _, rewards in scored]
    spreads = [_std(rewards, conventions.logged_std_ddof) for _, rewards in scored]
    metrics = {
        "reward": _mean(every),
        "reward_std": _std(every, conventions.logged_std_ddof) if conventions.logged_std == "batch" else _mean(spreads),
        "reward_min": min(every),
        "reward_max": max(every),
        "no_signal": _mean([min(rewards) == max(rewards) for _, rewards in scored]),
        "all_right": _mean([all(each) for each in right]),
        "none_right": _mean([not any(each) for each in right]),
    }
    for dataset in dict.fromkeys(dataset for dataset, _ in scored):
        own = [reward for each, rewards in scored if each == dataset for reward in rewards]
        metrics[f"reward/{dataset}"] = _mean(own)
    return metrics


def scores(rewards: Sequence[float], conventions: Conventions) -> list[float]:
    """Return the rewards or scores that count, where `unscored` says what a NaN is.

    Raises:
        ValueError: one is NaN and `unscored` is "error".
    """
    if conventions.unscored == "error" and any(map(math.isnan, rewards)):
        raise ValueError("a completion has no reward (NaN): declare whether it is left out or counts as 0")
    if conventions.unscored == "zero":
        return [0.0 if math.isnan(reward) else reward for reward in rewards]
    return [reward for reward in rewards if not math.isnan(reward)]


def _length(completion: Completion, eos_token_ids: Sequence[int], conventions: Conventions) -> int:
    ids = list(completion.token_ids)
    counts = [True] * len(ids)
    if conventions.logged_length == "sampled" and completion.sampled is not None:
        counts = list(completion.sampled)
    ends_with_eos = bool(ids) and ids[-1] in eos_token_ids
    if ends_with_eos and not conventions.length_counts_eos:
        counts[-1] = False
    return sum(counts)


def merged_metrics(parts: Sequence[dict[str, Metric]]) -> dict[str, float]:
    """Reduce the metrics of several parts, each as it says, over the parts that have it with a count above 0.

    Args:
        parts: the metrics of each part by name, in order.

    Returns:
        The reduced metrics; one that no part has a value of is left out.

    Raises:
        ValueError: a metric has another reduction in another part.
    """
    merged = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        found = [part[name] for part in parts if name in part]
        reductions = {metric.reduction for metric in found}
        if len(reductions) > 1:
            raise ValueError(f"the metric {name} is reduced in several ways: {', '.join(sorted(reductions))}")
        if counted := [metric for metric in found if metric.count > 0]:
            merged[name] = _reduced(counted)
    return merged


def _reduced(metrics: Sequence[Metric]) -> float:
    values = [metric.value for metric in metrics]
    match metrics[0].reduction:
        case "sum":
            return math.fsum(values)
        case "min":
            return min(values)
        case "max":
            return max(values)
        case "last":
            return values[-1]
    return math.fsum(each.value * each.count for each in metrics) / math.fsum(each.count for each in metrics)


def evaluation_metrics(items: Sequence[EvaluatedItem], k: int, conventions: Conventions) -> dict[str, float]:
    """Compute the metrics of an evaluation that `Adapter.evaluation_metrics` names, by dataset and over all.

    Args:
        items: their samples may differ in number; a metric of which one item has no value is left out.
        k: the number of samples of best@k and pass@k.
        conventions: unscored, pass_threshold, best_at_k, vote_tie and overall_score are used.

    Raises:
        ValueError: a score is NaN and `unscored` is "error".
    """
    measured = [(item.dataset, _item_metrics(item, k, conventions)) for item in items]
    measured = [(dataset, metrics) for dataset, metrics in measured if metrics]
    result = {}
    for name in ("mean@n", "best@k", "pass@k", "maj@n"):
        if not measured or any(name not in metrics for _, metrics in measured):
            continue
        by_dataset: dict[str, list[float]] = {}
        for dataset, metrics in measured:
            by_dataset.setdefault(dataset, []).append(metrics[name])
        means = {dataset: _mean(values) for dataset, values in by_dataset.items()}
        over_items = _mean([metrics[name] for _, metrics in measured])
        result[name] = over_items if conventions.overall_score == "items" else _mean(list(means.values()))
        result |= {f"{dataset}/{name}": mean for dataset, mean in means.items()}
    return result


def _item_metrics(item: EvaluatedItem, k: int, conventions: Conventions) -> dict[str, float]:
    counted = scores(item.scores, conventions)
    if not counted:
        return {}
    metrics = {"mean@n": _mean(counted)}
    if k <= len(counted):
        metrics["best@k"] = best_at_k(counted, k, with_replacement=conventions.best_at_k == "resampled")
        metrics["pass@k"] = pass_at_k(len(counted), sum(_is_right(score, conventions) for score in counted), k)
    if item.answers is not None:
        # A sample that is left out has no vote.
        is_out = conventions.unscored == "exclude"
        pairs = zip(item.answers, item.scores, strict=True)
        voters = [(answer, score) for answer, score in pairs if not (is_out and math.isnan(score))]
        metrics["maj@n"] = vote([answer for answer, _ in voters], counted, shared=conventions.vote_tie == "shared")
    return metrics


def pass_at_k(n: int, right: int, k: int) -> float:
    """Estimate the probability that k samples have a right one, from `right` of n: 1 - C(n - right, k) / C(n, k)."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def best_at_k(scores: Sequence[float], k: int, *, with_replacement: bool) -> float:
    """Compute the mean of the best of k of these scores, over all subsets of k or over all draws with replacement."""
    n, ordered = len(scores), sorted(scores)
    if with_replacement:
        weights = [(place / n) ** k - ((place - 1) / n) ** k for place in range(1, n + 1)]
    else:
        # The best is the one at this place if the others are among those below it.
        weights = [math.comb(place - 1, k - 1) / math.comb(n, k) for place in range(1, n + 1)]
    return math.fsum(weight * score for weight, score in zip(weights, ordered, strict=True))


def vote(answers: Sequence[str], scores: Sequence[float], *, shared: bool) -> float:
    """Return the score of the answer with most votes; of several, the mean of their scores or that of the first one."""
    votes = Counter(answers)
    most = max(votes.values())
    winners = [answer for answer, number in votes.items() if number == most]
    won = [scores[list(answers).index(answer)] for answer in winners]
    return _mean(won) if shared else won[0]


def evaluation_items(n_items: int, rank: int, n_ranks: int) -> list[int]:
    """Return every `n_ranks`-th item from this rank's first on: each item on one rank, whatever the number of items."""
    return list(range(rank, n_items, n_ranks))


def evaluation_steps(n_steps: int, every: int, *, at_start: bool, at_end: bool) -> list[int]:
    """Return the updates after which a run evaluates, of 0 to `n_steps`."""
    ends = {0: at_start, n_steps: at_end}
    return [step for step in range(n_steps + 1) if ends.get(step) or (step > 0 and step % every == 0)]


def logged_samples(batch: RolloutBatch, n_samples: int) -> list[LoggedSample]:
    """Return the first completions, in the order of the groups.

    Raises:
        ValueError: a completion has no text.
    """
    rows = [
        LoggedSample(group.prompt_ids, _text(completion), reward, batch.step)
        for group in batch.groups
        for completion, reward in zip(group.completions, group.rewards, strict=True)
    ]
    return rows[:n_samples]


def _text(completion: Completion) -> str:
    if completion.text is None:
        raise ValueError("a completion without text cannot be logged: decode it first")
    return completion.text


def _is_right(score: float, conventions: Conventions) -> bool:
    return (0.0 if math.isnan(score) and conventions.unscored == "zero" else score) >= conventions.pass_threshold


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float], ddof: int) -> float:
    """Return the standard deviation, NaN where there are too few values for it."""
    if len(values) <= ddof:
        return math.nan
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))
