"""The suites hold together: scripts, lists, plans, names and cost."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pytest

from rlcanary.contract.presets import PRESETS
from rlcanary.errors import UserError
from rlcanary.launch.suite import Line, read_configuration, read_list

ROOT = Path(__file__).parents[3]
SUITES = ROOT / "tests" / "test_suites"
LISTS = ("nightly.txt", "release.txt")
NIGHTLY_GPU_HOURS = Fraction(0)
"""A nightly on machines without GPUs: raise it with the first script that needs one."""
NAME = re.compile(
    r"(?P<algorithm>[a-z]+(-[a-z]+)*?)-\w+-(?P<nodes>\d+)n(?P<gpus>\d+)g-(?P<engine>transformers|vllm)(\.v\d+)?"
)


def problems(suites: Path) -> Iterable[str]:
    """What does not hold together, a line each."""
    scripts = {str(file.relative_to(suites)) for file in suites.glob("llm/*.sh")}
    listed = Counter(str(line.script) for name in (*LISTS, "disabled.txt") for line in read_list(suites / name))
    yield from (f"{script} is in no list" for script in sorted(scripts - set(listed)))
    yield from (f"{script} is listed and does not exist" for script in sorted(set(listed) - scripts))
    yield from (f"{script} is listed {count} times" for script, count in listed.items() if count > 1)
    for line in read_list(suites / "disabled.txt"):
        if not line.reason:
            yield f"{line.script} is disabled without a reason"
    plans = {f"llm/{file.stem}.sh" for file in suites.glob("llm/plans/*.yaml")}
    yield from (f"{script} has no plan" for script in sorted(scripts - plans))
    yield from (f"the plan of {script} has no script" for script in sorted(plans - scripts))
    for script in sorted(scripts & plans):
        yield from problems_of(suites, script)


def problems_of(suites: Path, script: str) -> Iterable[str]:
    yaml = pytest.importorskip("yaml")
    name = NAME.fullmatch(Path(script).stem)
    if name is None:
        yield f"{script} is not named algorithm-task-NnGg-engine"
        return
    plan = yaml.safe_load((suites / "llm" / "plans" / f"{Path(script).stem}.yaml").read_text())
    if plan["conventions"]["preset"] != name["algorithm"] or name["algorithm"] not in PRESETS:
        yield f"{script} is named for {name['algorithm']} and trains with {plan['conventions']['preset']}"
    engine = plan.get("roles", {}).get("sampler", {}).get("engine", "transformers")
    if engine != name["engine"]:
        yield f"{script} is named for {name['engine']} and samples with {engine}"
    try:
        configuration = read_configuration(suites / script)
    except UserError as error:
        yield str(error)
        return
    if (configuration.nodes, configuration.gpus_per_node) != (int(name["nodes"]), int(name["gpus"])):
        yield f"{script} asks for {configuration.nodes} nodes with {configuration.gpus_per_node} GPUs"
    if plan["run"]["steps"] != configuration.max_steps:
        yield f"{script} takes {configuration.max_steps} steps, its plan {plan['run']['steps']}"
    if configuration.runs * configuration.steps_per_run < configuration.max_steps:
        yield f"{script} does not reach its last step in {configuration.runs} runs"
    if "rlcanary check-metrics" not in (suites / script).read_text():
        yield f"{script} judges no metrics"


def test_suites_hold_together() -> None:
    assert list(problems(SUITES)) == []


def test_nightly_keeps_its_budget() -> None:
    hours = sum(
        (read_configuration(SUITES / line.script).gpu_hours for line in read_list(SUITES / "nightly.txt")), Fraction()
    )
    assert hours <= NIGHTLY_GPU_HOURS


@pytest.mark.parametrize(
    ("file", "before", "after", "problem"),
    [
        ("release.txt", "llm/", "# llm/", "is in no list"),
        ("nightly.txt", "transformers.sh", "transformers.sh\nllm/grpo-gone-1n0g-vllm.sh", "does not exist"),
        ("nightly.txt", "transformers.sh", "transformers.sh\nllm/grpo-sums-1n0g-vllm.sh", "is listed 2 times"),
        ("disabled.txt", "reason.\n", "reason.\nllm/grpo-sums-1n0g-vllm.sh\n", "disabled without a reason"),
        (
            "llm/plans/grpo-sums-1n0g-vllm.yaml",
            "preset: grpo",
            "preset: dapo",
            "and trains with dapo",
        ),
        ("llm/plans/grpo-sums-1n0g-vllm.yaml", "engine: vllm", "engine: transformers", "samples with transformers"),
        ("llm/plans/grpo-sums-1n0g-vllm.yaml", "steps: 20", "steps: 21", "takes 20 steps, its plan 21"),
        ("llm/grpo-sums-1n0g-vllm.sh", "GPUS_PER_NODE=0", "GPUS_PER_NODE=8", "asks for 1 nodes with 8 GPUs"),
        ("llm/grpo-sums-1n0g-vllm.sh", "GPUS_PER_NODE=0", "", "GPUS_PER_NODE is 'missing'"),
        ("llm/grpo-sums-1n0g-vllm.sh", "rlcanary check-metrics", "true", "judges no metrics"),
        ("llm/grpo-sums-1n0g-transformers.sh", "NUM_RUNS=$((", "NUM_RUNS=1 # $((", "does not reach its last step"),
    ],
)
def test_each_inconsistency_is_told(tmp_path: Path, file: str, before: str, after: str, problem: str) -> None:
    suites = tmp_path / "test_suites"
    subprocess.run(["cp", "-r", SUITES, suites], check=True)
    text = (suites / file).read_text()
    assert before in text
    (suites / file).write_text(text.replace(before, after))
    assert any(problem in found for found in problems(suites)), list(problems(suites))


def test_disabled_script_needs_no_other_list(tmp_path: Path) -> None:
    suites = tmp_path / "test_suites"
    subprocess.run(["cp", "-r", SUITES, suites], check=True)
    (suites / "release.txt").write_text("# None.\n")
    with (suites / "disabled.txt").open("a") as file:
        file.write("llm/grpo-sums-1n0g-vllm.sh  # the engine hangs #123\n")
    assert list(problems(suites)) == []
    assert read_list(suites / "disabled.txt") == [Line(Path("llm/grpo-sums-1n0g-vllm.sh"), "the engine hangs #123")]


def test_script_without_plan_and_plan_without_script_are_told(tmp_path: Path) -> None:
    suites = tmp_path / "test_suites"
    subprocess.run(["cp", "-r", SUITES, suites], check=True)
    plans = suites / "llm" / "plans"
    (plans / "grpo-sums-1n0g-vllm.yaml").rename(plans / "grpo-other-1n0g-vllm.yaml")
    no_plan, no_script = sorted(problems(suites))
    assert "sums-1n0g-vllm.sh has no plan" in no_plan
    assert "other-1n0g-vllm.sh has no script" in no_script


@pytest.mark.parametrize("line", ["exit 0", "NUM_NODES=$(printf '1\\n2')"])
def test_configuration_block_that_does_not_set_each_value_on_a_line_is_refused(tmp_path: Path, line: str) -> None:
    script = tmp_path / "x.sh"
    script.write_text(f"# ===== BEGIN CONFIG =====\n{line}\n# ===== END CONFIG =====\n")
    with pytest.raises(UserError, match="it has to reach its end, and each value to be on one line"):
        read_configuration(script)
