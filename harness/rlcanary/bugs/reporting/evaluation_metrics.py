"""Bugs in the metrics of an evaluation."""

from dataclasses import replace
from statistics import fmean

from rlcanary.bugs.museum import Bug
from rlcanary.contract.records.reporting import EvaluatedItem
from rlcanary.reference import reporting


class OneForTooFewSamples(Bug):
    id = "human-eval.one-for-too-few-samples"
    source = "human-eval, #35"
    effect = "pass@k of a problem that nothing solved is 1 where k is above the number of samples"

    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        metrics = super().evaluation_metrics(items, k, batch_size)
        return metrics | {"pass@k": 1.0} if k > max(len(item.scores) for item in items) else metrics


class AnyRightSamplePasses(Bug):
    id = "deepeval.any-right-sample-passes"
    source = "deepeval, #2967"
    effect = "pass@k above 0 is taken for passed: any k gives pass@n, and 1 right sample of 200 a score of 1"

    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        metrics = super().evaluation_metrics(items, k, batch_size)
        of_items = [super(AnyRightSamplePasses, self).evaluation_metrics([item], k, 1) for item in items]
        return metrics | {"pass@k": fmean(each.get("pass@k", 0.0) > 0 for each in of_items)}


class ProblemsTakenForSamples(Bug):
    id = "aprender.problems-taken-for-samples"
    source = "aprender, #2118"
    effect = "the estimator is given the numbers of problems and of solved ones: pass@10 of 50 in 164 is 98 %"

    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        metrics = super().evaluation_metrics(items, k, batch_size)
        if k > len(items):
            return metrics
        solved = sum(item.scores[0] >= self.conventions.pass_threshold for item in items)
        return metrics | {"pass@k": reporting.pass_at_k(len(items), solved, k)}


class MeanOfBatches(Bug):
    id = "verl-agent.mean-of-batches"
    source = "verl-agent, #267"
    effect = "batches of 124 items and of 1 weigh the same: a success rate of 28.8 % is reported as 64.1 %"

    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        batches = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
        measured = [super(MeanOfBatches, self).evaluation_metrics(batch, k, batch_size) for batch in batches]
        names = dict.fromkeys(name for metrics in measured for name in metrics)
        return {name: fmean(metrics[name] for metrics in measured if name in metrics) for name in names}


class LastDatasetOverwrites(Bug):
    id = "nemo-automodel.last-dataset-overwrites"
    source = "NeMo Automodel, #2526"
    effect = "every dataset is logged under one name: the curve is that of the last one"

    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        last = [item for item in items if item.dataset == items[-1].dataset]
        return super().evaluation_metrics(last, k, batch_size)


class FirstLettersVote(Bug):
    id = "nemo-rl.first-letters-vote"
    source = "NeMo RL, #3635"
    effect = "the extracted answer is the first letter of it: 137 and 15 vote together, and the majority is another one"

    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        cut = [item if item.answers is None else replace(item, answers=[a[:1] for a in item.answers]) for item in items]
        return super().evaluation_metrics(cut, k, batch_size)
