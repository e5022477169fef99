"""Engines in lower precision than the trainer: green where they are right and their distance is declared."""

from styles.low_precision import BfloatEngine, EightBitEngine, LastMatrixNeverSent, OneScaleForAllMatrices

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check
from rlcanary.checks.worlds.training.states import shaken, sizes_of
from rlcanary.checks.worlds.training.tiny_trainer import tiny_policy
from rlcanary.contract.presets import GRPO

CHECKS = {check.id: check for check in all_checks()}
OF_ENGINES = [check for check in CHECKS.values() if check.area in ("sync", "parity")]


def red(adapter: ReferenceAdapter) -> list[str]:
    results = [run_check(check, adapter, "unused") for check in OF_ENGINES]
    return [result.id for result in results if result.status in ("fail", "error")]


def test_bfloat16_engine_is_green_where_its_distance_is_declared() -> None:
    assert red(BfloatEngine()) == []


def test_bfloat16_engine_is_red_where_nothing_is_declared() -> None:
    assert {"parity.logprobs", "sync.every_time"} <= set(red(BfloatEngine(GRPO)))


def test_matrix_that_a_bfloat16_engine_never_gets_is_a_finding() -> None:
    for check_id in ("sync.every_time", "sync.every_parameter", "sync.every_engine"):
        assert run_check(CHECKS[check_id], LastMatrixNeverSent(), "unused").status == "fail"


def test_scales_are_judged_exactly_in_eight_bits_too() -> None:
    assert run_check(CHECKS["sync.small_weights"], EightBitEngine(), "unused").status == "pass"
    assert run_check(CHECKS["sync.small_weights"], OneScaleForAllMatrices(), "unused").status == "fail"


def test_no_sync_makes_weights_grow_beyond_what_the_declared_distance_is_for() -> None:
    state = BfloatEngine().new_state(tiny_policy(), None, 1e-3)
    sizes = sizes_of(state.model)
    for _ in range(3):
        shaken(state, 0.5)
    assert all(size < sizes[name] * 1.0001 for name, size in sizes_of(state.model).items())
