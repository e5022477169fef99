"""Verifiers in real Ray actors: a call that hangs, raises or takes its process along is told apart from a wrong answer."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise

import pytest
from test_grpo_ahead import groups_of, require_balance
from test_grpo_train import a_plan, log_of
from waiting import HANG_S, QUICK_S, wait_for

from rlcanary.errors import UserError
from rlcanary.grpo.rewards import by_name
from rlcanary.grpo.rewards.by_name import VerifiersByName
from rlcanary.grpo.rewards.pool import VerifierPool
from rlcanary.grpo.train import train

pytestmark = pytest.mark.ray


def obedient():
    """Makes a verifier that does what the completion says. Workers cannot import this module, but take a local function."""

    def make():
        import os
        import time

        from rlcanary.errors import UserError
        from rlcanary.grpo.rewards.verifier import Score

        class Obedient:
            bounds = (0.0, 1.0)

            def verify(self, completion, target):
                match completion:
                    case "hang":
                        while True:
                            pass
                    case "wait":
                        target.touch()
                        time.sleep(9999)
                    case "hang in C":
                        return Score(float(9**9**9 == 1))
                    case "meet":
                        (target / str(os.getpid())).touch()
                        while len(list(target.iterdir())) < 2:
                            time.sleep(0.01)
                    case "raise":
                        raise ZeroDivisionError("by zero")
                    case "die":
                        os._exit(1)
                    case "misconfigured":
                        raise UserError("no verifier for this type")
                return Score(float(completion == target))

        return Obedient()

    return make


@pytest.fixture(scope="module")
def shared(ray_cluster):
    """For tests that cost no worker: what a test starts, the replacements too, is ended behind it."""
    with closing(VerifierPool(obedient(), workers=2, timeout_s=HANG_S)) as pool:
        yield pool


@pytest.fixture
def pool(ray_cluster):
    with closing(VerifierPool(obedient(), workers=2, timeout_s=QUICK_S)) as pool:
        yield pool


def test_scores_and_bounds_are_those_of_the_verifier(shared):
    assert shared.bounds == (0.0, 1.0)
    assert shared.verify("7", "7").value == 1.0
    assert (shared.verify("8", "7").value, shared.verify("8", "7").problem) == (0.0, None)


@pytest.mark.parametrize("completion", ["hang", "hang in C"])
def test_call_that_hangs_is_a_timeout_and_no_zero(pool, completion):
    score = pool.verify(completion, "7")
    assert (score.value, score.problem) == (None, "timeout")
    assert pool.verify("7", "7").value == 1.0


def test_call_that_raises_is_an_exception_and_no_zero(shared):
    score = shared.verify("raise", "7")
    assert (score.value, score.problem, score.detail) == (None, "exception", "ZeroDivisionError: by zero")


def test_call_whose_process_dies_is_told_and_its_worker_replaced(pool):
    assert [pool.verify("die", "7").problem for _ in range(3)] == ["worker died"] * 3
    assert pool.verify("7", "7").value == 1.0


def test_misconfiguration_is_an_error_and_no_score(shared):
    with pytest.raises(UserError, match="no verifier for this type"):
        shared.verify("misconfigured", "7")
    assert shared.verify("7", "7").value == 1.0


def test_hanging_calls_take_no_slot_from_the_others(pool):
    with ThreadPoolExecutor(4) as threads:
        hanging = [threads.submit(pool.verify, "hang", "7") for _ in range(2)]
        others = [threads.submit(pool.verify, str(index), "7") for index in range(8)]
        assert [future.result(HANG_S).problem for future in hanging] == ["timeout"] * 2
        assert [future.result(HANG_S).value for future in others] == [float(index == 7) for index in range(8)]


def test_calls_run_at_once_and_every_one_leaves_a_span(shared, tmp_path):
    shared.drain_spans()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda completion: shared.verify(completion, tmp_path), ["meet"] * 4))
    spans = sorted(shared.drain_spans(), key=lambda span: span.began_s)
    assert len(spans) == 4
    assert all(span.seconds > 0 and span.problem is None for span in spans)
    assert {span.worker for span in spans} == {0, 1}
    assert spans[1].began_s < spans[0].began_s + spans[0].seconds
    for worker in (0, 1):
        own = [span for span in spans if span.worker == worker]
        assert all(a.began_s + a.seconds <= b.began_s + 0.01 for a, b in pairwise(own))
    assert shared.drain_spans() == []


def test_worker_that_cannot_be_made_is_refused_at_the_start(ray_cluster):
    def broken():
        raise LookupError("no such data")

    with pytest.raises(UserError, match="LookupError: no such data"):
        VerifierPool(broken, workers=1)


@pytest.mark.parametrize("settings", [{"workers": 0}, {"timeout_s": 0}])
def test_pool_without_workers_or_limit_is_refused(settings):
    with pytest.raises(UserError, match="workers and a time limit"):
        VerifierPool(obedient(), **settings)


def test_first_call_to_a_slow_library_is_warmed_up(ray_cluster):
    verifiers = VerifiersByName(workers=1, timeout_s=QUICK_S)
    try:
        assert verifiers["math"].verify("<answer>42</answer>", "42").value == 1.0
        assert verifiers["math"].verify(r"\boxed{\frac{2}{4}}", "0.5").value == 1.0
        assert verifiers.tallies()["math"].problems == {}
        assert [(name, span.problem) for name, span in verifiers.drain_spans()] == [("math", None)] * 2
    finally:
        verifiers.close()


def test_closing_ends_the_workers_and_those_who_wait(ray_cluster, tmp_path):
    pool = VerifierPool(obedient(), workers=1, timeout_s=HANG_S)
    results = []

    def call():
        try:
            results.append(pool.verify("wait", tmp_path / "begun").problem)
        except RuntimeError as error:
            results.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for((tmp_path / "begun").exists)
    pool.close()
    for thread in threads:
        thread.join(HANG_S)
    assert sorted(results) == ["the verifier pool is closed", "worker died"]
    with pytest.raises(RuntimeError, match="closed"):
        pool.verify("7", "7")


def test_run_with_verifiers_on_ray_traces_each_call_and_logs_what_a_local_run_logs(ray_cluster, tmp_path):
    train(a_plan(tmp_path / "local", 2))
    on_ray = {
        "runtime__kind": "ray",
        "roles__verifier": {"workers": 1, "timeout_s": HANG_S},
        "roles__sampler": {"cpus": 0.5},
    }
    train(a_plan(tmp_path / "ray", 2, **on_ray))
    assert log_of(tmp_path / "ray") == log_of(tmp_path / "local")
    spans = [json.loads(line) for line in (tmp_path / "ray" / "trace.ndjson").read_text().splitlines()]
    verified = [span for span in spans if span["name"] == "verify"]
    assert len(verified) == 2 * 16
    assert {(span["verifier"], span["worker"]) for span in verified} == {("exact", 0)}


def hangs_on_eight():
    """As `obedient`, a class that workers can take."""
    import time

    from rlcanary.grpo.rewards.exact import ExactVerifier

    class HangsOnEight(ExactVerifier):
        def verify(self, completion, target):
            if target == "8":
                time.sleep(3600)
            return super().verify(completion, target)

    return HangsOnEight


def test_run_goes_on_without_the_item_that_a_verifier_hangs_on(ray_cluster, tmp_path, monkeypatch):
    monkeypatch.setitem(by_name.VERIFIERS, "exact", hangs_on_eight())
    rows = [{"id": str(number), "prompt": f"{number}=", "target": str(number)} for number in range(3, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = a_plan(
        tmp_path / "run",
        3,
        data__datasets=[{"name": str(tmp_path / "rows.jsonl")}],
        schedule={"prompts_per_step": 3, "group_size": 2, "max_staleness": 1},
        runtime__kind="ray",
        roles={"verifier": {"workers": 2, "timeout_s": QUICK_S}, "sampler": {"cpus": 0.5}},
    )
    outcome = train(plan)
    fates = require_balance(tmp_path / "run", outcome)
    assert fates["used"] == 3 * 3
    unscored = [group["item_id"] for group in groups_of(tmp_path / "run") if group["fate"] == "unscored"]
    assert len(unscored) >= 3
    assert len(set(unscored)) == 1
    assert unscored[0].endswith("/8")
    assert sum(line.get("verifier/timeout", 0) for line in log_of(tmp_path / "run")) >= 3
