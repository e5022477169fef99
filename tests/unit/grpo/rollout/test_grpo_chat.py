"""Prompts of later turns hold what was sampled, and masks hold nothing else, whatever the text would encode to."""

import math
from typing import Any

import pytest
import torch

from rlcanary.contract.batch import Completion, PolicyBatch
from rlcanary.contract.presets import GRPO
from rlcanary.errors import UserError
from rlcanary.grpo.data.templates import prompt_ids, require_chat_template
from rlcanary.grpo.rollout.chat import render_chats, sampled_message
from rlcanary.reference import policy_loss
from rlcanary.tiny_models import EOS_ID, tiny_chat_tokenizer, tiny_tokenizer

ASKED = {"role": "user", "content": "say hello"}
TOOL = {"role": "tool", "content": "hello"}


@pytest.fixture
def tokenizer() -> Any:
    return tiny_chat_tokenizer()


def spelled(tokenizer: Any, text: str, end: bool = True, logprob: float = -0.5) -> Completion:
    """A completion sampled letter by letter, whose text has other ids when it is encoded again."""
    ids = [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]
    ids += [EOS_ID] if end else []
    assert tokenizer.encode(text, add_special_tokens=False) != ids[: len(text)]
    return Completion(ids, [logprob] * len(ids), "stop" if end else "length", text=text)


def test_every_prompt_begins_with_the_earlier_ones_and_what_was_sampled(tokenizer: Any) -> None:
    messages: list[Any] = [ASKED]
    before: list[int] = []
    for turn in range(4):
        prompt = prompt_ids(messages, tokenizer)
        assert prompt[: len(before)] == before
        completion = spelled(tokenizer, "hello", end=turn != 1)
        before = [*prompt, *completion.token_ids]
        messages += [sampled_message(completion), TOOL]
    whole = render_chats([messages], tokenizer)
    assert whole.tokens.full[0][: len(before)].tolist() == before
    assert int(whole.masks.full[0].sum()) == 6 + 5 + 6 + 6


def test_mask_covers_the_sampled_ids_of_all_turns_and_nothing_else(tokenizer: Any) -> None:
    first, second = spelled(tokenizer, "hello"), spelled(tokenizer, "four", end=False)
    history = {"role": "assistant", "content": "hello"}
    messages = [ASKED, history, ASKED, sampled_message(first), TOOL, sampled_message(second)]
    chats = render_chats([messages], tokenizer)
    written = chats.tokens.full[0][chats.masks.full[0]].tolist()
    assert written == [*first.token_ids, *second.token_ids]
    assert not chats.masks.prompt[0].any()
    assert chats.tokens.prompt[0].tolist() == prompt_ids(messages[:3], tokenizer)


def test_logprobs_stand_beside_the_ids_that_they_belong_to_and_are_nan_elsewhere(tokenizer: Any) -> None:
    first, second = spelled(tokenizer, "hello", logprob=-1.0), spelled(tokenizer, "yes", logprob=-2.0)
    chats = render_chats([[ASKED, sampled_message(first), TOOL, sampled_message(second)]], tokenizer)
    logprobs, mask = chats.logprobs.full[0], chats.masks.full[0]
    assert logprobs[mask].tolist() == [-1.0] * 6 + [-2.0] * 4
    assert logprobs[~mask].isnan().all()


def test_tool_results_are_not_trained(tokenizer: Any) -> None:
    turns = [sampled_message(spelled(tokenizer, "hello")), TOOL, sampled_message(spelled(tokenizer, "four"))]
    chats = render_chats([[ASKED, *turns]], tokenizer)
    mask_BR = chats.masks.padded()[1]
    old_BR = chats.logprobs.padded()[1]
    logprobs_BR = torch.full(old_BR.shape, -0.5, requires_grad=True)
    batch = PolicyBatch(logprobs_BR, old_BR, torch.ones(1), mask_BR)
    policy_loss(batch, GRPO).loss.backward()
    assert torch.equal(logprobs_BR.grad != 0, mask_BR)
    # Masked wrongly, the tool's tokens have no logprob to be trained against.
    with pytest.raises(ValueError, match="not scored"):
        policy_loss(PolicyBatch(logprobs_BR, old_BR, torch.ones(1), torch.ones_like(mask_BR)), GRPO)


def test_conversation_without_a_sampled_turn_is_all_prompt(tokenizer: Any) -> None:
    chats = render_chats([[ASKED, {"role": "assistant", "content": "hello"}]], tokenizer)
    assert len(chats.tokens.response[0]) == 0


def test_message_without_logprobs_is_unscored_not_certain(tokenizer: Any) -> None:
    completion = Completion(spelled(tokenizer, "hello").token_ids, None, text="hello")
    chats = render_chats([[ASKED, sampled_message(completion)]], tokenizer)
    assert all(math.isnan(value) for value in chats.logprobs.full[0])


def test_what_is_no_turn_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="aborted"):
        sampled_message(Completion([5], finish_reason="abort", text="a"))
    with pytest.raises(ValueError, match="without its text"):
        sampled_message(Completion([5]))
    message = {**sampled_message(spelled(tokenizer, "hello")), "logprobs": [-1.0]}
    with pytest.raises(ValueError, match="6 token_ids and 1 logprobs"):
        render_chats([[ASKED, message]], tokenizer)


def test_tokenizer_without_a_template_is_refused() -> None:
    for call in (lambda: prompt_ids([ASKED], tiny_tokenizer()), lambda: render_chats([[ASKED]], tiny_tokenizer())):
        with pytest.raises(UserError, match="has no chat template"):
            call()
    require_chat_template(tiny_chat_tokenizer())
