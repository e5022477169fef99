"""Reporting: the numbers and samples that people look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.records.reporting import EvaluatedItem, LoggedSample, Metric, RolloutBatch


class Reporting:
    """Numbers and samples that a run logs of its rollouts and evaluations. A metric that is not logged is not compared."""

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        """Compute the metrics of rollouts whose groups lie on `n_ranks` data-parallel ranks, as the run logs them.

        A completion counts once, and so does a group. `reward`, `reward_min`, `reward_max` and `reward/<dataset>` are over
        completions, `reward_std` as `logged_std` declares. `length`, `length_min` and `length_max` are tokens of a
        completion as `logged_length` declares, `length_right` the mean length of the right completions, those with a reward
        of at least `pass_threshold`. `stopped`, `truncated` and `aborted` are the shares of completions with the finish
        reason "stop", "length" and "abort". `no_signal`, `all_right` and `none_right` are the shares of groups whose
        rewards are all equal, whose completions are all right, and with no right one. `staleness` and `staleness_max` are
        the mean and maximum over completions of `trainer_version` minus the group's policy version.
        """
        raise NotProvided

    def merged_metrics(self, parts: list[dict[str, Metric]]) -> dict[str, float]:
        """Reduce the metrics of micro-batches, ranks or steps, in this order, to those that are logged.

        Each metric says its reduction and the count that it was taken over. A part need not have every metric.
        """
        raise NotProvided

    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        """Compute the metrics of an evaluation that went through its items in batches of `batch_size`.

        For each item: `mean@n` is the mean of its scores, `best@k` the expected best of k of its samples, `pass@k` the
        probability that k of them have a right one (a score of at least `pass_threshold`; unbiased estimate of arXiv
        2107.03374), and `maj@n` the score of the answer with most votes. The name alone is the metric over all items,
        `<dataset>/<name>` that of one dataset, such as `math/pass@k`; the names have the letter k, whatever its value.
        Code for scores of 0 and 1 declines others with `NotProvided`, as does code for equal numbers of samples.
        """
        raise NotProvided

    def evaluation_items(self, n_items: int, batch_size: int, rank: int, n_ranks: int) -> list[int]:
        """Indices of the items that this rank evaluates and counts in one evaluation, in batches of `batch_size`.

        Repeated items that only fill a batch are not counted, and are not among them. Each call is another evaluation.
        """
        raise NotProvided

    def evaluation_steps(self, n_steps: int, every: int, at_start: bool, at_end: bool) -> list[int]:
        """Updates after which a run of `n_steps` evaluates: each multiple of `every`, 0 if `at_start`, the last if `at_end`.

        Code without one of the two settings declines the other value of it with `NotProvided`.
        """
        raise NotProvided

    def logged_samples(self, batch: RolloutBatch, n_samples: int) -> list[LoggedSample]:
        """Choose completions for the table of samples: `n_samples` of them, or all if there are fewer, none twice.

        A table that shows prompts as text declines nothing: map its text back to the prompt's ids.
        """
        raise NotProvided
