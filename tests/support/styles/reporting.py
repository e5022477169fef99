"""Numbers and samples by hand: sums that ranks reduce, and tables of rows with bootstrapped estimates."""

import math
import random
from collections import defaultdict
from itertools import chain

import numpy as np

from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.records.reporting import LoggedSample

# The declarations of the table.
OF_TABLES = {
    "logged_std": "group",
    "logged_std_ddof": 0,
    "logged_length": "sampled",
    "length_counts_eos": False,
    "unscored": "exclude",
    "pass_threshold": 0.5,
    "best_at_k": "resampled",
    "vote_tie": "shared",
    "overall_score": "datasets",
}


class ReducedOverRanks(Adapter):
    """Every rank adds up its own groups; what is logged is made of the reduced sums, minima and maxima.

    Lengths count all tokens; a NaN reward is NaN on the dashboard.
    """

    def rollout_metrics(self, batch, n_ranks):
        totals, lowest, highest = defaultdict(float), defaultdict(lambda: math.inf), defaultdict(lambda: -math.inf)
        gathered = []
        for rank in range(n_ranks):
            for group in batch.groups[rank::n_ranks]:
                self._add(group, batch, totals, lowest, highest)
                gathered += group.rewards
        rows, groups = totals["rows"], totals["groups"]
        metrics = {
            "reward": totals["reward"] / rows,
            "reward_std": float(np.std(np.array(gathered), ddof=1)),
            "reward_min": lowest["reward"],
            "reward_max": highest["reward"],
            "length": totals["length"] / rows,
            "length_min": lowest["length"],
            "length_max": highest["length"],
            "stopped": totals["stop"] / rows,
            "truncated": totals["length reason"] / rows,
            "aborted": 1 - totals["stop"] / rows - totals["length reason"] / rows,
            "no_signal": 1 - totals["with signal"] / groups,
            "all_right": totals["all right"] / groups,
            "none_right": totals["none right"] / groups,
            "staleness": batch.trainer_version - totals["version"] / rows,
            "staleness_max": batch.trainer_version - lowest["version"],
        }
        for group in batch.groups:
            metrics[f"reward/{group.dataset}"] = totals["reward", group.dataset] / totals["rows", group.dataset]
        if totals["right"]:
            metrics["length_right"] = totals["right tokens"] / totals["right"]
        return metrics

    def _add(self, group, batch, totals, lowest, highest):
        right = 0
        for completion, reward in zip(group.completions, group.rewards, strict=True):
            tokens = len(completion.token_ids)
            is_right = reward >= self.conventions.pass_threshold
            right += is_right
            named = {"rows": 1, "reward": reward, "length": tokens, "version": group.policy_version}
            named |= {"right": is_right, "right tokens": is_right * tokens}
            named |= {"stop": completion.finish_reason == "stop", "length reason": completion.finish_reason == "length"}
            for name, value in named.items():
                totals[name] += value
            for name in ("rows", "reward"):
                totals[name, group.dataset] += named[name]
            for name in ("reward", "length", "version"):
                lowest[name], highest[name] = min(lowest[name], named[name]), max(highest[name], named[name])
        totals["groups"] += 1
        totals["with signal"] += len(set(group.rewards)) > 1
        totals["all right"] += right == len(group.rewards)
        totals["none right"] += right == 0

    def merged_metrics(self, parts):
        kept, weights = {}, defaultdict(float)
        for name, metric in chain.from_iterable(part.items() for part in parts):
            if not metric.count:
                continue
            value = metric.value * metric.count if metric.reduction == "mean" else metric.value
            weights[name] += metric.count if metric.reduction == "mean" else 0
            if name in kept:
                join = {"min": min, "max": max, "last": lambda _, new: new}.get(metric.reduction, float.__add__)
                value = join(float(kept[name]), float(value))
            kept[name] = value
        return {name: value / (weights[name] or 1.0) for name, value in kept.items()}

    def evaluation_metrics(self, items, k, batch_size):
        sums, counts = defaultdict(float), defaultdict(int)
        for start in range(0, len(items), batch_size):
            for item in items[start : start + batch_size]:
                for name, value in self._measured(item, k).items():
                    for key in (name, f"{item.dataset}/{name}"):
                        sums[key] += value
                        counts[key] += 1
        return {key: total / counts[key] for key, total in sums.items()}

    def _measured(self, item, k):
        ordered = np.sort(np.array(item.scores))
        n = len(ordered)
        if k > n:
            raise ValueError(f"{k} of {n} samples")
        right = int((ordered >= self.conventions.pass_threshold).sum())
        passed = 1.0 if n - right < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - right + 1, n + 1)))
        measured = {"mean@n": float(ordered.mean()), "pass@k": passed}
        # The best falls from place to place as higher ones are not among the k.
        chance, best = 1.0, 0.0
        for above, score in enumerate(ordered[::-1]):
            taken = k / (n - above)
            best += chance * min(taken, 1.0) * float(score)
            chance *= max(1.0 - taken, 0.0)
            if chance == 0.0:
                break
        measured["best@k"] = best
        if item.answers is not None:
            answers = list(item.answers)
            winner = max(range(n), key=lambda place: (answers.count(answers[place]), -place))
            measured["maj@n"] = item.scores[winner]
        return measured

    def evaluation_items(self, n_items, batch_size, rank, n_ranks):
        """A contiguous piece; its last batch is filled up, and what filled it is cut off again."""
        own = np.array_split(np.arange(n_items), n_ranks)[rank].tolist()
        filled = own + own[:1] * (-len(own) % batch_size)
        return filled[: len(own)]

    def evaluation_steps(self, n_steps, every, at_start, at_end):
        steps, done = ([0] if at_start else []), 0
        while done < n_steps:
            done += 1
            if done % every == 0 or (done == n_steps and at_end):
                steps.append(done)
        return steps

    def logged_samples(self, batch, n_samples):
        rows = [
            LoggedSample(tuple(group.prompt_ids), completion.text, reward, batch.step)
            for group in batch.groups
            for completion, reward in zip(group.completions, group.rewards, strict=True)
        ]
        return random.Random(batch.step).sample(rows, min(n_samples, len(rows)))


class TableOfRows(Adapter):
    """One table with a row per sample, NaN rewards left out, and 2000 draws for the best of k."""

    def rollout_metrics(self, batch, n_ranks):
        lengths, rewards, stds, names, reasons = [], [], [], [], []
        for group in batch.groups:
            scored = np.array([reward for reward in group.rewards if reward == reward])
            stds += [scored.std()] if len(scored) else []
            for completion, reward in zip(group.completions, group.rewards, strict=True):
                own = np.array(completion.token_ids)
                if completion.sampled is not None:
                    own = own[np.array(completion.sampled)]
                is_end = len(completion.token_ids) and completion.token_ids[-1] in batch.eos_token_ids
                lengths.append(len(own[:-1] if is_end else own))
                rewards.append(reward)
                names.append(group.dataset)
                reasons.append(completion.finish_reason)
        rewards, names = np.array(rewards), np.array(names)
        lengths, reasons = np.array(lengths), np.array(reasons)
        metrics = {
            "reward": np.nanmean(rewards),
            "reward_std": np.mean(stds),
            "reward_min": np.nanmin(rewards),
            "reward_max": np.nanmax(rewards),
            "length": lengths.mean(),
            "length_max": lengths.max(),
            "truncated": (reasons == "length").mean(),
        }
        if (rewards >= self.conventions.pass_threshold).any():
            metrics["length_right"] = lengths[rewards >= self.conventions.pass_threshold].mean()
        for name in np.unique(names):
            metrics[f"reward/{name}"] = np.nanmean(rewards[names == name])
        return {name: float(value) for name, value in metrics.items()}

    def evaluation_metrics(self, items, k, batch_size):
        draws, table = np.random.default_rng(7), defaultdict(list)
        for item in items:
            kept = [place for place, score in enumerate(item.scores) if score == score]
            scores = np.array(item.scores)[kept]
            if k > len(scores):
                raise NotProvided(f"{k} of {len(scores)} samples")
            right = scores >= self.conventions.pass_threshold
            table[item.dataset, "mean@n"].append(scores.mean())
            table[item.dataset, "best@k"].append(draws.choice(scores, (2000, k)).max(axis=1).mean())
            wrong = math.prod((len(scores) - right.sum() - drawn) / (len(scores) - drawn) for drawn in range(k))
            table[item.dataset, "pass@k"].append(1 - max(wrong, 0.0))
            if item.answers is not None:
                _, first, votes = np.unique(np.array(item.answers)[kept], return_index=True, return_counts=True)
                table[item.dataset, "maj@n"].append(scores[first[votes == votes.max()]].mean())
        means = {key: float(np.mean(values)) for key, values in table.items()}
        by_name = defaultdict(list)
        for (_, name), mean in means.items():
            by_name[name].append(mean)
        overall = {name: float(np.mean(values)) for name, values in by_name.items()}
        return overall | {f"{dataset}/{name}": mean for (dataset, name), mean in means.items()}
