"""A chat environment opens, continues and judges conversations; what the policy saw is what is trained on."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from rlcanary.contract.batch import Completion
from rlcanary.errors import UserError
from rlcanary.grpo.data.datasets import Row
from rlcanary.grpo.data.items import ItemIterator
from rlcanary.grpo.engines.transformers_policy import TransformersPolicy
from rlcanary.grpo.rewards.gsm8k import GSM8KVerifier
from rlcanary.grpo.rewards.ifeval import IFEvalVerifier
from rlcanary.grpo.rollout.chat import render_chats
from rlcanary.grpo.rollout.environment import ChatEnvironment, Conversation, trajectory
from rlcanary.grpo.tools.python_tool import PythonTool
from rlcanary.tiny_models import EOS_ID, tiny_chat_tokenizer, tiny_llama

GSM8K = Row("apples", "3 apples and 4 pears?", "3 + 4 = 7\n#### 7", verifier="gsm8k")
IFEVAL = Row(
    "quiet",
    "say yes, in small letters",
    {"instruction_id_list": ["change_case:english_lowercase"], "kwargs": [{}]},
    verifier="ifeval",
)
VERIFIERS = {"gsm8k": GSM8KVerifier(), "ifeval": IFEvalVerifier()}
CODE = "```python\nprint(3 + 4)\n```"


class Scripted:
    """An engine that gives these answers, and remembers what it was asked."""

    version = 0

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.prompts: list[list[int]] = []
        self.completions: list[Completion] = []

    async def agenerate(self, prompt: Sequence[int], sampling: Any) -> list[Completion]:
        self.prompts.append(list(prompt))
        text = self.answers.pop(0)
        ids = [*tokenizer().encode(text, add_special_tokens=False), EOS_ID]
        self.completions.append(Completion(ids, [-1.0] * len(ids), text=text))
        return self.completions[-1:]


def tokenizer() -> Any:
    return tiny_chat_tokenizer()


def environment(**options: Any) -> ChatEnvironment:
    return ChatEnvironment([GSM8K, IFEVAL], tokenizer(), VERIFIERS, **options)


def play(where: ChatEnvironment, row: Row, *answers: str) -> tuple[Conversation, Scripted]:
    engine = Scripted(*answers)
    return asyncio.run(where.play(engine, row, {})), engine


@pytest.mark.parametrize(("answer", "reward"), [("the answer is 7", 1.0), ("#### 8", 0.0), ("no idea", 0.0)])
def test_gsm8k_row_is_judged_by_its_verifier(answer: str, reward: float) -> None:
    conversation, _ = play(environment(), GSM8K, answer)
    assert (conversation.ended, conversation.step_rewards) == ("answered", [reward])


@pytest.mark.parametrize(("answer", "reward"), [("yes", 1.0), ("Yes", 0.0)])
def test_ifeval_row_is_judged_by_its_verifier(answer: str, reward: float) -> None:
    conversation, _ = play(environment(), IFEVAL, answer)
    assert conversation.step_rewards == [reward]


def test_tool_replies_and_the_last_answer_is_judged() -> None:
    where = environment(tools=[PythonTool()], max_turns=3)
    conversation, engine = play(where, GSM8K, f"I compute.\n{CODE}", "the answer is 7")
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert conversation.messages[2]["content"] == "7"
    assert conversation.step_rewards == [0.0, 1.0]
    assert len(engine.prompts) == 2


def test_what_the_policy_saw_and_drew_is_what_is_rendered_for_training() -> None:
    where = environment(tools=[PythonTool()], max_turns=3, system_prompt="be brief")
    conversation, engine = play(where, GSM8K, CODE, CODE, "#### 7")
    chats = render_chats([conversation.messages], tokenizer())
    whole = chats.tokens.full[0].tolist()
    for prompt, completion in zip(engine.prompts, engine.completions, strict=True):
        seen = [*prompt, *completion.token_ids]
        assert whole[: len(seen)] == seen
    assert int(chats.masks.full[0].sum()) == sum(len(each.token_ids) for each in engine.completions)


def test_trajectory_has_one_step_per_turn_and_no_logprob_for_what_tools_wrote() -> None:
    where = environment(tools=[PythonTool()], max_turns=3)
    conversation, engine = play(where, GSM8K, CODE, CODE, "#### 7")
    told = trajectory(conversation, tokenizer(), epoch=2)
    assert (told.item_id, told.epoch, list(told.step_rewards)) == ("apples", 2, [0.0, 0.0, 1.0])
    assert list(told.prompt_ids) == engine.prompts[0]
    steps = [engine.prompts[turn + 1][len(engine.prompts[turn]) :] for turn in range(2)]
    assert list(told.step_lengths)[:2] == [len(step) for step in steps]
    assert told.completion.logprobs is not None
    scored = [not math.isnan(logprob) for logprob in told.completion.logprobs]
    assert sum(scored) == sum(len(each.token_ids) for each in engine.completions)


def test_tokens_of_a_trajectory_keep_the_policy_versions_of_their_turns() -> None:
    where = environment(tools=[PythonTool()], max_turns=2)
    conversation = where.reset(GSM8K)
    turns = [(CODE, 3, 4), ("#### 7", 5, 5)]
    for text, first, later in turns:
        ids = [*tokenizer().encode(text, add_special_tokens=False), EOS_ID]
        versions = [first, *[later] * (len(ids) - 1)]
        conversation = where.step(conversation, Completion(ids, text=text, token_versions=versions))
    told = trajectory(conversation, tokenizer())
    first_turn, last_turn = told.step_lengths
    assert told.completion.token_versions == [3, *[4] * (first_turn - 1), *[5] * last_turn]
    assert told.policy_version == 3


def test_turns_without_versions_are_those_of_the_caller() -> None:
    conversation, _ = play(environment(), GSM8K, "#### 7")
    told = trajectory(conversation, tokenizer(), policy_version=6)
    assert told.completion.token_versions == [6] * len(told.completion.token_ids)
    assert told.policy_version == 6


def test_turns_are_limited_and_the_tool_of_the_last_is_not_run() -> None:
    conversation, _ = play(environment(tools=[PythonTool()], max_turns=2), GSM8K, CODE, CODE)
    assert (conversation.ended, conversation.turns) == ("turns", 2)
    assert conversation.messages[-1]["role"] == "assistant"
    assert conversation.step_rewards[0] == 0


def test_truncated_answer_ends_the_conversation_without_a_tool() -> None:
    where = environment(tools=[PythonTool()], max_turns=3)
    conversation = where.step(where.reset(GSM8K), Completion([5], finish_reason="length", text=CODE))
    assert (conversation.ended, conversation.turns) == ("truncated", 1)


def test_verifier_that_cannot_judge_gives_nan_and_not_zero() -> None:
    where = ChatEnvironment([Row("odd", "?", "no number", verifier="gsm8k")], tokenizer(), VERIFIERS)
    conversation, _ = play(where, where.rows[0], "7")
    assert conversation.score is not None
    assert conversation.score.problem == "bad target"
    assert math.isnan(conversation.step_rewards[0])


def test_reward_before_the_end_and_steps_after_it_are_refused() -> None:
    where = environment()
    conversation = where.reset(GSM8K)
    with pytest.raises(ValueError, match="'apples' is under way"):
        _ = conversation.step_rewards
    ended = where.step(conversation, Completion([5], text="7"))
    with pytest.raises(ValueError, match="is over: answered"):
        where.step(ended, Completion([5], text="7"))
    assert conversation.added == ()


def test_system_prompt_stands_before_rows_that_have_none() -> None:
    where = environment(system_prompt="be brief")
    assert where.reset(GSM8K).messages[0] == {"role": "system", "content": "be brief"}
    own = Row("own", "?", "7", verifier="gsm8k", system_prompt="")
    assert where.reset(own).messages == [{"role": "user", "content": "?"}]


def test_what_cannot_work_is_refused_before_anything_is_sampled() -> None:
    with pytest.raises(UserError, match=r"ifeval; .* gsm8k"):
        ChatEnvironment([IFEVAL], tokenizer(), {"gsm8k": GSM8KVerifier()})
    with pytest.raises(UserError, match="max_turns=1"):
        environment(tools=[PythonTool()])
    bare = tokenizer()
    bare.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        ChatEnvironment([GSM8K], bare, VERIFIERS)


def test_generated_dataset_is_played_with_a_real_policy() -> None:
    where = ChatEnvironment.from_dataset(
        "arithmetic", tokenizer(), {"exact": GSM8KVerifier("last_number")}, dataset_options={"count": 6}
    )
    policy = TransformersPolicy(tiny_llama(vocabulary=len(tokenizer())), tokenizer())
    items = ItemIterator(where.rows)
    items.start_epoch()

    async def all_rows() -> list[Conversation]:
        rows = [row for row in iter(items.next_item, None) if row is not None]
        return await asyncio.gather(*(where.play(policy, row, {"max_new_tokens": 4}) for row in rows))

    played = asyncio.run(all_rows())
    assert [each.row.id for each in played] == [row.id for row in where.rows]
    chats = render_chats([each.messages for each in played], tokenizer())
    sampled = chats.logprobs.full
    scored = policy.logprobs(chats.tokens, chats.masks, "assistant").full
    for left, right, mask in zip(sampled, scored, chats.masks.full, strict=True):
        assert mask.any()
        assert bool((left[mask] - right[mask]).abs().max() < 1e-4)
        assert right[~mask].isnan().all()
