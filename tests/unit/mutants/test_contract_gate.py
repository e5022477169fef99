"""The checks of data, rollouts, credit and reporting kill every mutant of their capabilities that is not equivalent."""

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks
from rlcanary.mutants.contract import contract_mutants
from rlcanary.mutants.equivalents import equivalents
from rlcanary.mutants.gather import drawn
from rlcanary.mutants.killing import Trial, judge
from rlcanary.mutants.mutant import Run

CAPABILITIES = {
    *("make_batch", "shape_rewards", "combine_rewards", "rollout", "render"),
    *("keep_group", "score", "data_order", "advantages"),
    *("rollout_metrics", "merged_metrics", "evaluation_metrics", "evaluation_items", "evaluation_steps"),
    *("logged_samples", "prepare", "run_plan", "token_advantages", "value_loss"),
    *("shard_rows", "gathered_logprobs", "vocab_parallel_logprobs", "replayed_routes"),
}
SEED, MUTANTS = 0, 110


def test_checks_kill_a_random_sample_of_what_ignores_the_contract() -> None:
    adapter = ReferenceAdapter()
    runs = [
        Run(check, 0.0, dict.fromkeys(check.needs, frozenset()))
        for check in all_checks()
        if set(check.needs) <= CAPABILITIES
    ]
    listed = {entry.id for entry in equivalents()}
    trials = [
        Trial("reference", adapter, mutant, [run for run in runs if mutant.reached_by(run)])
        for mutant in contract_mutants(adapter)
        if mutant.where.partition(":")[2] in CAPABILITIES and mutant.id not in listed
    ]
    assert len(trials) > 100
    sample = drawn(trials, MUTANTS, SEED)
    assert [trial.mutant.id for trial in sample if judge(trial).verdict not in ("killed", "crashed")] == []
