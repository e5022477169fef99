"""The names of rlvr-experiments, on the bundled trainer: each module says what the trainer does, with values by hand."""

import asyncio
import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rlcanary.errors import UserError
from rlcanary.tiny_models import tiny_chat_tokenizer

SHIM = Path(__file__).parents[3] / "examples/rlvr_experiments/shim"
TESTED = (
    "entrypoints.train_grpo",
    "rlvr_experiments.algorithms.grpo",
    "rlvr_experiments.buffer",
    "rlvr_experiments.data",
    "rlvr_experiments.losses",
    "rlvr_experiments.ops",
    "rlvr_experiments.verifiers.ifeval",
    "rlvr_experiments.verifiers.math",
    "rlvr_experiments.verifiers.minerva_math",
    "rlvr_experiments.verifiers.multi",
    "rlvr_experiments.vllm_engine_actor",
)


@pytest.fixture(scope="module")
def shim() -> Iterator[dict[str, ModuleType]]:
    """The modules by name, imported from the example's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SHIM)
        yield {name: import_module(name) for name in TESTED}


def test_modules_are_those_that_the_tests_import(shim: dict[str, ModuleType]) -> None:
    paths = {path for path in SHIM.rglob("*.py") if path.name != "__init__.py"}
    assert {Path(str(module.__file__)) for module in shim.values()} == paths


def test_logprob_of_a_token_is_read_one_position_before_it(shim: dict[str, ModuleType]) -> None:
    score = shim["rlvr_experiments.ops"].compute_logprobs
    logits = torch.zeros(2, 4, 4)
    logits[0, 1, 3] = logits[1, 2, 3] = math.log(3)
    ids = torch.tensor([[3], [3]])
    logprobs, entropy = score(logits, ids, prompt_lens=torch.tensor([2, 3]))
    assert logprobs.tolist() == [[pytest.approx(-math.log(2))]] * 2
    assert entropy[0, 0] == pytest.approx(math.log(2) / 2 + math.log(6) / 2)
    assert score(logits, ids)[0].tolist() == [[pytest.approx(-math.log(4))], [pytest.approx(-math.log(2))]]
    assert score(logits[:, 2:], torch.tensor([[3, 3]] * 2), align=False)[0][1, 0] == pytest.approx(-math.log(2))


def test_loss_is_the_clipped_ratio_and_the_kl(shim: dict[str, ModuleType]) -> None:
    losses = shim["rlvr_experiments.losses"]
    assert losses.compute_advantages(torch.tensor([1.0, 3.0, 5.0, 5.0]), group_size=2).tolist() == pytest.approx(
        [-math.sqrt(0.5), math.sqrt(0.5), 0, 0]
    )
    now = torch.full((2, 1), -math.log(4))
    # Ratios 1.5, cut to 1.2, and 1; the reference finds each token twice as likely.
    old = now - torch.tensor([[1.5], [1.0]]).log()
    loss = losses.GRPOLoss(beta=0.5, eps=0.2)(
        torch.zeros(2, 2, 4),
        torch.zeros(2, 1, dtype=torch.long),
        now + math.log(2),
        old,
        torch.tensor([2.0, -1.0]),
        torch.ones(2, 1),
    )
    assert float(loss) == pytest.approx((-2.4 + 1) / 2 + 0.5 * (2 - math.log(2) - 1))


def test_end_is_trained_where_its_id_is_that_of_the_padding(shim: dict[str, ModuleType]) -> None:
    grpo = shim["rlvr_experiments.algorithms.grpo"]

    def answered(*ids: int) -> Any:
        at = [{id: SimpleNamespace(logprob=-0.25 * id)} for id in ids]
        return SimpleNamespace(token_ids=list(ids), logprobs=at, finish_reason="stop")

    response = SimpleNamespace(prompt_token_ids=[5, 6], outputs=[answered(7, 2), answered(2)])
    rollout = grpo.RolloutSample.from_vllm(response, pad_token_id=2)
    assert rollout.input_ids.tolist() == [[5, 6, 7, 2], [5, 6, 2, 2]]
    sample = grpo.TrainSample(rollout, [1.0, 0.0], None, item_id="a", trainer_version=3)
    batch, stats = grpo.make_batch([sample], 2, seq_len_buckets=[5], completion_len_buckets=[3])
    assert batch.mask.tolist() == [[1, 1, 0], [1, 0, 0]]
    assert batch.logprobs[0, :2].tolist() == [-1.75, -0.5]
    assert (stats.seq_lens, stats.padded_seq_len, stats.finish_reasons) == ([4, 3], 5, {"stop": 2})


def test_buffer_gives_each_item_once_in_order_and_then_the_end(shim: dict[str, ModuleType]) -> None:
    module = shim["rlvr_experiments.buffer"]
    buffer = module.DataBuffer()

    async def play() -> list[Any]:
        await buffer.put("old", version=0, item_id="a")
        await buffer.put("new", version=4, item_id="b")
        assert buffer.stats.get_by_version() == {0: 1, 4: 1}
        await buffer.mark_done()
        return [await buffer.pop() for _ in range(3)]

    assert asyncio.run(play()) == [module.Entry("old", 0, 0, "a"), module.Entry("new", 4, 0, "b"), None]
    assert buffer.get_stats() == {"put": 3, "popped": 3, "current_size": 0}
    with pytest.raises(ValueError, match="leaves the buffer when it is read"):
        module.DataBuffer(max_reads=2)


def test_items_come_in_the_order_given_and_a_fate_is_told_once(shim: dict[str, ModuleType]) -> None:
    data = shim["rlvr_experiments.data"]
    rows = [{"prompt": f"{at}?", "problem": {"prompt_id": f"id_{at}", "assistant_prefix": "So"}} for at in range(3)]
    dataset = SimpleNamespace(take_all=lambda: rows)
    items = data.DataIterator(dataset, tiny_chat_tokenizer(), system_prompt="Be brief.", order=["id_2", "id_0"])
    items.new_epoch()
    first = items.get_next()
    assert first["problem"]["prompt_id"] == "id_2"
    assert first["template"] == (
        "<bos><|start|>system\nBe brief.<|end|>\n<|start|>user\n2?<|end|>\n<|start|>assistant\nSo"
    )
    items.mark_pending("id_2")
    assert [items.get_next()["prompt"] for _ in range(2)] == ["2?", "0?"]
    items.mark_failed("id_2")
    with pytest.raises(ValueError, match="not in flight"):
        items.mark_pending("id_2")
    with pytest.raises(RuntimeError, match="still in flight"):
        items.new_epoch()
    items.mark_done("id_0")
    with pytest.raises(UserError, match="unknown ids: 'id_9'"):
        items.new_epoch(order=["id_9"])
    with pytest.raises(ValueError, match="Unknown dataset 'none'"):
        data.load_mixed([{"name": "none"}])


def test_requests_go_to_the_least_loaded_replica_and_wait_while_weights_move(shim: dict[str, ModuleType]) -> None:
    module = shim["rlvr_experiments.vllm_engine_actor"]
    asked: list[tuple[int, str]] = []

    def actor(number: int) -> Any:
        async def generate(prompts: list[str], temperature: float) -> list[Any]:
            asked.append((number, prompts[0]))
            await asyncio.sleep(0)
            output = SimpleNamespace(token_ids=[1], text=f"{prompts[0]} at {temperature}", finish_reason="stop")
            return [SimpleNamespace(outputs=[output])]

        return SimpleNamespace(generate=SimpleNamespace(remote=generate))

    async def play() -> None:
        handle = module.VLLMHandle([actor(0), actor(1)])
        answers = await asyncio.gather(*(handle.generate_single(prompt, temperature=0.5) for prompt in "ab"))
        assert [answer.outputs[0].text for answer in answers] == ["a at 0.5", "b at 0.5"]
        assert asked == [(0, "a"), (1, "b")]
        await handle.stop()
        waiting = asyncio.ensure_future(handle.generate_single("c", temperature=1.0))
        await asyncio.sleep(0)
        assert (len(asked), handle._in_flight) == (2, 0)
        handle.resume()
        assert (await waiting).outputs[0].text == "c at 1.0"
        assert handle.get_replica_loads() == [0, 0]
        router = module.LoadAwareRouter(num_replicas=2, max_concurrent_per_replica=2)
        assert [await router.acquire_slot() for _ in range(3)] == [(0, 0), (1, 0), (0, 1)]
        await router.release_slot(0, 0)
        assert router.get_load() == [1, 1]

    asyncio.run(play())


def test_schedule_counts_in_optimizer_steps_and_rounds_nothing(shim: dict[str, ModuleType]) -> None:
    schedule = shim["entrypoints.train_grpo"]._compute_schedule
    given = {"prompts_per_optim_step": 8, "prompts_per_forward_backward": 2, "prompts_per_reference_sync": 0}
    assert schedule(given | {"prompts_per_rollout_sync": 16, "max_staleness": 1}) == {
        "accumulation_steps": 4,
        "sync_model_every": 2,
        "sync_ref_every": 0,
        "max_staleness": 1,
    }
    with pytest.raises(ValueError, match="sync_every is 0"):
        schedule(given | {"prompts_per_rollout_sync": 3})


def test_constraints_are_those_of_ifeval(shim: dict[str, ModuleType]) -> None:
    ifeval = shim["rlvr_experiments.verifiers.ifeval"]
    assert ifeval.verify_word_count("one two three", N=3, quantifier="exactly")
    assert not ifeval.verify_word_count("one two three", N=2, quantifier="at_most")
    assert ifeval.verify_keyword_frequency("Test TEST", keyword="test", N=2)
    assert not ifeval.verify_keyword_frequency("test")
    assert not ifeval.verify_two_responses("one\n***\ntwo")
    assert ifeval.verify_two_responses("one\n******\ntwo")
    assert ifeval.IFEvalVerifier().verify("hello", '{"func_name": "validate_lowercase", "N": null}') == 1.0
    assert ifeval.IFEvalVerifier().verify("hello", "no JSON") == 0.0


def test_verifier_that_a_problem_names_judges_it(shim: dict[str, ModuleType]) -> None:
    math_verifier = shim["rlvr_experiments.verifiers.math"]
    assert math_verifier._verify_single("The total is 1,234 units.", "1234") == 1.0
    assert math_verifier._verify_single("42", "not a number at all") == 0.0
    assert math_verifier._extract_last_number("1,234 and then -3.5") == "-3.5"
    assert math_verifier._normalize_number("42.0") == "42"
    minerva = shim["rlvr_experiments.verifiers.minerva_math"]
    assert minerva.extract_boxed_strict(r"\boxed{3} or \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert minerva.normalize_answer(r"\quad \dfrac{1}{2}\,") == r"\frac{1}{2}"
    multi = shim["rlvr_experiments.verifiers.multi"].MultiVerifier(math_max_workers=1)
    try:
        named = {"verifier_type": "ifeval", "ground_truth": {"func_name": "validate_no_commas"}}
        right = {"verifier_type": "math", "answer": r"\boxed{\frac{1}{2}}"}
        scores, spent, spans = asyncio.run(
            multi.verify_batch_with_timing([named, named, right], ["a b", "a, b", r"\boxed{0.5}"])
        )
        assert scores == [1.0, 0.0, 1.0]
        assert spans == [(0, spent[0]), (spent[0], spent[1]), (spent[0] + spent[1], spent[2])]
        with pytest.raises(ValueError, match="Unknown verifier_type 'other'"):
            asyncio.run(multi.verify_completions({"verifier_type": "other"}, ["a"]))
    finally:
        math_verifier.pool(1, 5.0).verifier.close()
        math_verifier.pool.cache_clear()
