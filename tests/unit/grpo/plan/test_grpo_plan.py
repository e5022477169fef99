"""A plan that cannot be run is refused before anything starts, and the message names the key."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcanary.contract.presets import PRESETS
from rlcanary.errors import UserError
from rlcanary.grpo.data.data import item_iterator
from rlcanary.grpo.plan.models import character_tokenizer
from rlcanary.grpo.plan.reading import plan_of, read_plan
from rlcanary.grpo.rewards.by_name import VerifiersByName
from rlcanary.grpo.training.run import check_plan

EXAMPLE = Path(__file__).parents[4] / "examples/arithmetic.yaml"


def given(**changes: Any) -> dict[str, Any]:
    plan: dict[str, Any] = {
        "run": {"folder": "somewhere", "steps": 2},
        "model": {"scratch": {}},
        "data": {"datasets": [{"name": "arithmetic"}]},
        "schedule": {"prompts_per_step": 4, "group_size": 4},
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        section = plan
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return plan


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedul": {}}, r"schedul is not a key of a plan: did you mean 'schedule'"),
        ({"run__stepz": 3}, r"run\.stepz is not a key of a plan: did you mean 'steps'"),
        ({"roles__sampler__gpus": 3}, r"roles\.sampler\.gpus is not a key"),
        ({"model__scratch__layers": "two"}, r"model\.scratch\.layers is 'two', it has to be a valid integer"),
        ({"run__tensorboard": 1}, r"run\.tensorboard is 1, it has to be a valid boolean"),
        ({"run__steps": True}, r"run\.steps is True, it has to be a valid integer"),
        ({"run__steps": 0}, r"run\.steps is 0, it has to be greater than or equal to 1"),
        ({"run": {"folder": "somewhere"}}, r"run\.steps is missing"),
        ({"model": {}}, "model: give either path or scratch"),
        ({"model": {"path": "nowhere/at/all"}}, r"model: path is nowhere/at/all, where no model is"),
        ({"lora": {"rank": 0}}, r"lora: rank is 0 \(at least 1\)"),
        ({"lora": {"targets": []}}, "lora: targets is empty"),
        ({"lora": {"target": ["q_proj"]}}, r"lora\.target is not a key of a plan: did you mean 'targets'"),
        ({"schedule__rows_per_update": 7}, "schedule: rows_per_update is 7"),
        ({"sampling": {"temprature": 1.0}}, "sampling: unknown sampling parameter 'temprature'"),
        ({"sampling": {"repetition_penalty": 1.3}}, r"sampling\.repetition_penalty is 1\.3"),
        ({"sampling": {"temperature": 0}}, "sampling: temperature is 0"),
        ({"sampling": {"temperature": -1}, "conventions": {"preset": "dapo"}}, "sampling: temperature"),
        ({"sampling": {"seed": 3}}, r"sampling\.seed"),
        ({"sampling": {"temperature": 0.6}, "conventions": {"temperature": 1.0}}, r"conventions: temperature is 1\.0"),
        ({"conventions": {"aggregation": "token"}}, r"conventions: aggregation='token' is not one of 'token_mean'"),
        ({"conventions": {"preset": "drpo"}}, "conventions: preset is 'drpo', it has to be one of grpo"),
        (
            {"conventions": {"objective": "custom"}},
            "conventions: objective is 'custom', which this trainer does not have",
        ),
        (
            {"conventions": {"preset": "ppo"}},
            r"conventions\.token_credit is gae, which needs a critic: add the section",
        ),
        (
            {"conventions": {"value_clip": 0.1}},
            r"conventions: value_clip is 0\.1, which needs a critic: add the section",
        ),
        ({"critic": {}}, r"conventions\.token_credit is outcome, which asks no critic: set it to gae"),
        ({"critic": {"learning_rate": 0}}, "critic: learning_rate is 0"),
        (
            {"conventions": {"token_credit": "turn_returns"}},
            r"conventions\.token_credit is turn_returns, which needs turn",
        ),
        ({"conventions": {"token_credit": "gae"}}, r"conventions\.token_credit is gae, which needs a critic"),
        (
            {"conventions": {"logged_std": "group"}},
            r"conventions: logged_std is 'group', which this trainer does not do",
        ),
        ({"conventions": {"data_order": "sequential"}}, "data_order is 'sequential', which this trainer does not do"),
        ({"conventions": {"decayed": "matrices"}}, "decayed is 'matrices', which this trainer does not do"),
        ({"conventions": {"epochs_per_rollout": 2}}, r"epochs_per_rollout is 2, but schedule\.epochs_per_step says"),
        ({"conventions": {"clip": 1}}, r"conventions\.clip is not a key of a plan: did you mean 'clip_low'"),
        ({"conventions": {"clip_low": "x"}}, r"conventions\.clip_low is 'x', it has to be a valid number"),
        (
            {"roles__sampler__options": {"beams": 2}},
            r"roles\.sampler: options of a transformers engine are max_batch_size.*beams",
        ),
        ({"roles__sampler__options": {"min_batch_size": 0}}, r"roles\.sampler: options: min_batch_size is 0"),
        ({"sampling": {"min_p": 0.1}}, r"sampling\.min_p is 0\.1, but"),
        ({"sampling": {"presence_penalty": 1.0}}, r"sampling\.presence_penalty is 1\.0, but the trainer scores"),
        ({"roles__sampler__engine": "sglang"}, r"roles\.sampler\.engine is 'sglang', it has to be 'transformers' or"),
        ({"roles__sampler__replicas": 2}, r"roles\.sampler\.replicas is 2, which needs runtime\.kind ray"),
        ({"roles__verifier__workers": -1}, r"roles\.verifier\.workers is -1"),
        ({"runtime": {"transport": "ray"}}, r"runtime\.transport is ray, which needs runtime\.kind ray"),
        ({"runtime": {"kind": "ray", "transport": "copy"}}, r"runtime\.transport is copy"),
        ({"data__datasets": []}, r"data\.datasets is \[\], it has to have at least 1 item"),
        ({"data__datasets": {}}, r"data\.datasets is {}, it has to be a valid array"),
        ({"optimizer": {"betas": [0.9]}}, r"optimizer\.betas\[1\] is missing"),
        ({"optimizer": {"learning_rate": 0}}, "optimizer: learning_rate is 0"),
        (
            {"schedule__max_staleness": 1, "conventions": {"old_logprobs": "trainer"}},
            r"schedule\.max_staleness lets sampling run 1 versions ahead",
        ),
        ({"evaluation": {"datasets": []}}, r"evaluation\.datasets is \[\], it has to have at least 1 item"),
        ({"evaluation": {"datasets": [{"name": "arithmetic"}], "every": 0}}, r"evaluation\.every is 0"),
        (
            {
                "evaluation": {"datasets": [{"name": "arithmetic"}], "every": 3},
                "schedule__sync_every": 2,
                "schedule__max_staleness": 1,
            },
            r"evaluation\.every is 3, .* every 2 steps .* make it a multiple",
        ),
        ({"sampling": {"top_k": 3}}, r"sampling\.top_k is 3, but conventions\.old_logprobs takes the ratio"),
        ({"sampling": {"top_p": 0.9}}, r"sampling\.top_p is 0\.9, but conventions\.old_logprobs takes the ratio"),
        (
            {"sampling": {"temperature": 0.6, "logprobs": "raw"}},
            r"sampling\.logprobs is raw, which is at temperature 1",
        ),
        ({"sampling": {"logprobs": None}}, r"sampling\.logprobs is empty"),
        (
            {
                "sampling": {"top_k": 3},
                "conventions": {"old_logprobs": "trainer", "importance_level": "token", "importance_high": 2.0},
            },
            r"sampling\.top_k is 3, but conventions\.importance_level takes the ratio",
        ),
        ({"schedule__group_size": 1}, r"schedule\.group_size is 1, but conventions\.advantage_baseline"),
        (
            {
                "schedule__group_size": 1,
                "schedule__dynamic_sampling": True,
                "conventions": {"advantage_baseline": "none", "advantage_scale": "none"},
            },
            r"schedule\.dynamic_sampling drops groups",
        ),
        ({"sampling": [1]}, r"sampling is \[1\], it has to be a mapping"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan_of(given(**changes))


NAN, INFINITE = float("nan"), float("inf")
WRONG_NUMBERS = {
    "run__seed": (-1, 2**32),
    **dict.fromkeys(("model__scratch__hidden_size", "model__scratch__layers"), (-1, 0)),
    **dict.fromkeys(("model__scratch__heads", "model__scratch__max_length"), (-1, 0)),
    "lora__alpha": (0, NAN, INFINITE),
    **dict.fromkeys(("optimizer__learning_rate", "critic__learning_rate"), (-1, 0, NAN, INFINITE)),
    **dict.fromkeys(("optimizer__weight_decay", "critic__weight_decay"), (-1, NAN, INFINITE)),
    **dict.fromkeys(("optimizer__betas", "critic__betas"), ([-0.1, 0.9], [0.9, 1], [NAN, 0.9], [0.9, INFINITE])),
    **{
        f"conventions__{name}": (-1, 0, NAN)
        for name in ("max_grad_norm", "reward_clip", "log_ratio_clamp", "kl_input_clamp", "kl_output_clamp")
    },
    **{f"conventions__{name}": (-1, NAN) for name in ("clip_low", "clip_high", "importance_low")},
    **{f"conventions__{name}": (-1, NAN, INFINITE) for name in ("advantage_eps", "evaluation_temperature", "kl_coef")},
    **{f"conventions__{name}": (-1, 0, NAN, INFINITE) for name in ("aggregation_constant", "value_coef")},
    "conventions__sapo_temperature_positive": (-1, 0, NAN, INFINITE),
    **dict.fromkeys(("conventions__entropy_coef", "conventions__off_policy_mask"), (NAN, INFINITE)),
    "conventions__importance_high": (-1, 0, NAN),
    "roles__sampler__cpus": (-1, NAN, INFINITE),
    "roles__sampler__options": (
        {"batching_timeout": NAN},
        {"batching_timeout": INFINITE},
        {"max_batch_size": True},
        {"min_batch_size": 1.5},
    ),
    **dict.fromkeys(("roles__sampler__request_timeout_s", "roles__verifier__timeout_s"), (-1, 0, NAN, INFINITE)),
    **dict.fromkeys(("runtime__start_timeout_s", "runtime__sync_timeout_s"), (-1, 0, NAN, INFINITE)),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG_NUMBERS.items() for value in values])
def test_a_number_without_a_meaning_is_refused_by_its_name(key: str, value: Any) -> None:
    changes = {"critic": {}, "conventions": {"preset": "ppo"}} if "critic" in key or "value_" in key else {}
    with pytest.raises(UserError, match=key.rpartition("__")[2]) as refused:
        plan_of(given(**changes, **{key: value}))
    assert "\n" not in str(refused.value)


def test_bounds_that_exclude_every_weight_are_refused() -> None:
    with pytest.raises(UserError, match=r"importance_low=3\.0 is above importance_high=2\.0"):
        plan_of(given(conventions={"importance_low": 3.0}))


@pytest.mark.parametrize(("size", "heads"), [(64, 3), (66, 2)])
def test_heads_that_do_not_share_the_features_evenly_are_refused(size: int, heads: int) -> None:
    with pytest.raises(UserError, match=rf"hidden_size is {size}, .* heads, {heads}"):
        plan_of(given(model={"scratch": {"hidden_size": size, "heads": heads}}))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_trained(preset: str) -> None:
    plan = plan_of(given(conventions={"preset": preset}, critic={} if preset == "ppo" else None))
    assert plan.conventions == PRESETS[preset]


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": {"top_k": 3, "logprobs": "raw"}},
        {"sampling": {"top_k": 3}, "conventions": {"old_logprobs": "trainer"}},
        {"schedule__group_size": 1, "conventions": {"advantage_baseline": "none", "advantage_scale": "none"}},
        {"schedule__group_size": 1, "conventions": {"preset": "ppo"}, "critic": {}},
    ],
)
def test_what_can_learn_is_not_refused(changes: dict[str, Any]) -> None:
    plan = plan_of(given(**changes))
    assert plan.sampling.top_k == changes.get("sampling", {}).get("top_k", 0)
    assert plan.schedule.group_size == changes.get("schedule__group_size", 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__scratch": {"characters": "0123456+= "}}, r"data\.datasets: the prompt of .* has .*'[789]'"),
        ({"schedule__seq_len_buckets": [2, 4]}, r"schedule\.seq_len_buckets end at 4, which the prompt of"),
        (
            {"schedule__seq_len_buckets": [4], "environment": {}},
            r"schedule\.seq_len_buckets end at 4, which the prompt of",
        ),
    ],
)
def test_prompts_of_which_nothing_can_be_learned_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_plan(plan_of(given(**{"data__datasets": [{"name": "arithmetic", "count": 200}], **changes})))


def test_an_order_file_says_what_each_epoch_visits(tmp_path: Path) -> None:
    ids = ["arithmetic/arithmetic-3", "arithmetic/arithmetic-0"]
    (tmp_path / "order.txt").write_text("".join(f"{id}\n" for id in ids))
    plan = plan_of(given(data__order=str(tmp_path / "order.txt"), data__answer_prefix="1"))
    tokenizer = character_tokenizer("0123456789+= ")
    items = item_iterator(plan.data, tokenizer, VerifiersByName(), seed=0)
    for _ in range(2):
        items.start_epoch()
        drawn = list(iter(items.next_item, None))
        assert [item.id for item in drawn] == ids
        assert all(tokenizer.decode(item.prompt_ids).endswith("=1") for item in drawn)
        items.reclaim()
        for item in iter(items.next_item, None):
            items.mark_done(item.id)


@pytest.mark.parametrize(
    ("order", "changes", "said"),
    [
        (
            "arithmetic/arithmetic-0\narithmetic/nowhere\n",
            {},
            r"data\.order: .*'arithmetic/nowhere', .*'arithmetic/arithmetic-0'",
        ),
        ("arithmetic/arithmetic-0\narithmetic/arithmetic-0\n", {}, r"data\.order: .*more than once"),
        ("", {}, r"data\.order: .*no id"),
        (None, {}, r"data\.order: cannot read"),
        ("", {"data__mixing": "sequence"}, r"data\.order says .* leave out data\.mixing"),
        ("", {"data__order": None, "data__answer_prefix": "1", "environment": {}}, r"data\.answer_prefix is set"),
    ],
)
def test_an_order_or_a_prefix_that_cannot_be_is_refused(
    tmp_path: Path, order: str | None, changes: dict[str, Any], said: str
) -> None:
    if order is not None:
        (tmp_path / "order.txt").write_text(order)
    with pytest.raises(UserError, match=said):
        check_plan(plan_of(given(**{"data__order": str(tmp_path / "order.txt"), **changes})))


def test_ppo_is_a_preset_with_a_critic() -> None:
    plan = plan_of(given(conventions={"preset": "ppo", "critic_lambda": 1.0}, critic={}))
    assert (plan.conventions.token_credit, plan.conventions.value_clip) == ("gae", 0.2)


def test_the_loss_scores_at_the_temperature_that_was_sampled_at() -> None:
    assert plan_of(given(sampling={"temperature": 0.6})).conventions.temperature == 0.6


def test_the_example_is_a_plan() -> None:
    assert read_plan(EXAMPLE).model.scratch is not None


def test_a_key_is_changed_from_the_command_line() -> None:
    plan = read_plan(EXAMPLE, ["run.steps=7", "roles.sampler.engine=vllm", "optimizer.learning_rate=1e-4"])
    assert (plan.run.steps, plan.roles.sampler.engine, plan.optimizer.learning_rate) == (7, "vllm", 1e-4)


@pytest.mark.parametrize("override", ["run.steps", "=3", "run.steps.more=3"])
def test_an_override_that_changes_nothing_is_refused(override: str) -> None:
    with pytest.raises(UserError):
        read_plan(EXAMPLE, [override])


@pytest.mark.parametrize("content", ["", "- 1\n", "run: [", "run: 3\n", "2020-01-01: 3\n", "run: &run [*run]\n"])
def test_a_file_that_is_no_plan_is_refused_by_its_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=r"plan\.yaml"):
        read_plan(path)


def test_bare_prompts_begin_with_the_system_prompt_of_their_row(tmp_path: Path) -> None:
    rows = [{"id": id, "prompt": "1+1=", "target": "2"} for id in ("a", "b", "c")]
    rows[1]["system_prompt"], rows[2]["system_prompt"] = "7", ""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    datasets = [{"name": str(tmp_path / "rows.jsonl")}]
    plan = plan_of(given(data={"datasets": datasets, "system_prompt": "0", "chat_template": False}))
    tokenizer = character_tokenizer("0123456789+= ")
    items = item_iterator(plan.data, tokenizer, VerifiersByName(), seed=0)
    prompts = [tokenizer.decode(item.prompt_ids) for item in items.items.values()]
    assert prompts == ["01+1=", "71+1=", "1+1="]


def test_rows_whose_answers_have_a_beginning_are_no_conversations(tmp_path: Path) -> None:
    row = {"id": "a", "prompt": "1+1=", "target": "2", "answer_prefix": "="}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    plan = plan_of(given(data__datasets=[{"name": str(tmp_path / "rows.jsonl")}], environment={"max_turns": 1}))
    with pytest.raises(UserError, match=r"data\.datasets: .*/a has an answer_prefix, but conversations"):
        check_plan(plan)
