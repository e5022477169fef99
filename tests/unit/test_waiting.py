"""No test rests on a clock: limits of the tests' own are guards against hangs, which stand in waiting.py."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
# Who waits for something to happen, and gives up; ray.wait and the like also tell that nothing has happened yet.
GIVE_UP = {"subprocess.run", "subprocess.check_output", "subprocess.check_call", "asyncio.wait_for"}
GIVE_UP_METHODS = {"communicate", "result"}
# A deadline that a wait compares with has no difference in it.
CLOCKS = ("time.monotonic()", "time.perf_counter()", "time.time()")


def resting_on_a_clock(tree: ast.AST) -> Iterator[ast.expr]:
    """The places of a test that hold on a fast machine only: a limit in figures, a time that must be below another."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            gives_up = name in GIVE_UP or name.rpartition(".")[2] in GIVE_UP_METHODS
            limits = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
            limits += node.args[-1:] if name == "asyncio.wait_for" or name.endswith(".result") else []
            if name == "pytest.mark.timeout" or (gives_up and any(in_figures(limit) for limit in limits)):
                yield node
        elif isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            took = ast.unparse(node.test.left)
            is_below = isinstance(node.test.ops[0], ast.Lt | ast.LtE)
            if is_below and "-" in took and any(clock in took for clock in CLOCKS):
                yield node.test


def in_figures(limit: ast.expr) -> bool:
    return isinstance(limit, ast.Constant) and isinstance(limit.value, int | float) and limit.value >= 0.1


def test_no_test_rests_on_a_clock() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{place.lineno}: {ast.unparse(place)}"
        for path in sorted(TESTS.rglob("*.py"))
        for place in resting_on_a_clock(ast.parse(path.read_text()))
    ]
    assert found == []


def test_rests_on_a_clock_is_told_from_a_guard() -> None:
    bad = "subprocess.run(c, timeout=60)\nasyncio.wait_for(x, 5)\nf.result(10)\nassert time.monotonic() - t < 5\n"
    good = "subprocess.run(c, timeout=HANG_S)\nasyncio.wait_for(x, HANG_S)\nassert time.monotonic() - t >= 5\nf.result(0)\n"
    assert len(list(resting_on_a_clock(ast.parse(bad)))) == 4
    assert list(resting_on_a_clock(ast.parse(good))) == []
