"""Prompts as texts, ids and conversations, and what a policy answers to them."""

from typing import Any

import pytest

from rlcanary.grpo.engines.transformers_policy import TransformersPolicy
from rlcanary.grpo.rollout.responses import respond
from rlcanary.tiny_models import tiny_chat_tokenizer, tiny_llama

ASKED = [{"role": "user", "content": "yes"}]
SAMPLING = {"n": 2, "max_new_tokens": 6, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def policy() -> TransformersPolicy:
    tokenizer = tiny_chat_tokenizer()
    return TransformersPolicy(tiny_llama(vocabulary=len(tokenizer)), tokenizer)


def test_a_prompt_is_answered_alike_as_text_as_ids_and_as_a_conversation(policy: TransformersPolicy) -> None:
    ids = policy.tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    text = policy.tokenizer.decode(ids)
    answers = respond(policy, [text, ids, ASKED], SAMPLING)
    assert [prompt.tolist() for prompt in answers.tokens.prompt] == [ids] * 6
    completions: list[Any] = [each.token_ids for each in answers.completions]
    assert completions[:2] == completions[2:4] == completions[4:]
    assert [prompt for prompt, _ in answers.texts] == [text] * 6
    assert [answer for _, answer in answers.texts] == [each.text for each in answers.completions]


def test_an_answer_is_in_every_container(policy: TransformersPolicy) -> None:
    answers = respond(policy, [ASKED, "hello"], SAMPLING)
    for row, completion in enumerate(answers.completions):
        assert answers.tokens.response[row].tolist() == completion.token_ids
        assert answers.logprobs.response[row].tolist() == pytest.approx(list(completion.logprobs or ()))
        assert int(answers.masks.full[row].sum()) == 6
        assert answers.logprobs.prompt[row].isnan().all()
    assert [len(history) for history in answers.histories] == [2, 2, 0, 0]
    assert answers.histories[1][-1]["token_ids"] == answers.completions[1].token_ids


def test_the_logprobs_of_a_prompt_are_those_that_scoring_gives(policy: TransformersPolicy) -> None:
    answers = respond(policy, ["hello yes four"], SAMPLING, prompt_logprobs=True)
    expected = policy.logprobs(answers.tokens, strategy="attention").prompt[0]
    assert answers.logprobs.prompt[0][1:].tolist() == pytest.approx(expected[1:].tolist())
    assert answers.logprobs.prompt[0][0].isnan()
    assert len(expected) > 2
