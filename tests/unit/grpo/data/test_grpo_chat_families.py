"""The most used chat families: what is trained, what the policy reads next, and where its answers end."""

from typing import Any

import pytest
from chat_families import FAMILIES, Family, family_tokenizer

from rlcanary.contract.batch import Completion
from rlcanary.errors import UserError
from rlcanary.grpo.data.templates import end_of_turn, prompt_ids, require_roles
from rlcanary.grpo.engines.policy import eos_ids
from rlcanary.grpo.rollout.chat import render_chats, sampled_message
from rlcanary.reference.data.rendering import render

Message = dict[str, Any]
ASKED: Message = {"role": "user", "content": "2+2?"}
AGAIN: Message = {"role": "user", "content": "sure?"}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def tokenizer(family: Family) -> Any:
    return family_tokenizer(family)


def answer(text: str, tokenizer: Any, end: str = "") -> Message:
    """A message that was sampled as these letters, and then the end."""
    ids = tokenizer.encode(text + end, add_special_tokens=False)
    return sampled_message(Completion(ids, [-0.5] * len(ids), text=text))


def trained(messages: list[Message], tokenizer: Any) -> str:
    ids, flags = render(messages, tokenizer)
    return str(tokenizer.decode([token for token, flag in zip(ids, flags, strict=True) if flag]))


def text_of(messages: list[Message], tokenizer: Any, **options: Any) -> str:
    plain = [{"role": each["role"], "content": each["content"]} for each in messages]
    return str(tokenizer.apply_chat_template(plain, tokenize=False, **options))


def test_answers_end_where_the_template_ends_them(family: Family, tokenizer: Any) -> None:
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids(family.end)
    assert eos_ids(None, tokenizer) == tuple(
        dict.fromkeys(tokenizer.convert_tokens_to_ids(token) for token in (family.eos, family.end))
    )


def test_prompts_grow_by_what_was_sampled_and_by_what_the_template_adds(family: Family, tokenizer: Any) -> None:
    first = prompt_ids([ASKED], tokenizer)
    assert tokenizer.decode(first) == text_of([ASKED], tokenizer, add_generation_prompt=True)
    thinking = answer("<think>\nfour\n</think>\n\n4", tokenizer, family.end)
    second = prompt_ids([ASKED, thinking, AGAIN], tokenizer)
    written = [*first, *thinking["token_ids"]]
    assert second[: len(written)] == written
    cut = answer("yes", tokenizer)
    third = prompt_ids([ASKED, thinking, AGAIN, cut, ASKED], tokenizer)
    assert third[: len(second) + 3] == [*second, *cut["token_ids"]]
    added = tokenizer.decode(third[len(second) + 3 :])
    assert text_of([ASKED, thinking, AGAIN, cut, ASKED], tokenizer, add_generation_prompt=True).endswith(added)
    assert AGAIN["content"] not in added
    assert ASKED["content"] in added


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.appends])
def test_conversations_are_the_templates_where_it_only_appends(name: str) -> None:
    tokenizer = family_tokenizer(FAMILIES[name])
    messages = [ASKED, answer("four", tokenizer, FAMILIES[name].end), AGAIN]
    asked = tokenizer.decode(prompt_ids(messages, tokenizer))
    assert asked == text_of(messages, tokenizer, add_generation_prompt=True)
    assert tokenizer.decode(render(messages, tokenizer)[0]) == text_of(messages, tokenizer)


def test_what_was_sampled_is_trained_and_nothing_else(family: Family, tokenizer: Any) -> None:
    sampled, cut = answer("four", tokenizer, family.end), answer("ye", tokenizer)
    assert trained([ASKED, sampled, AGAIN, cut], tokenizer) == f"four{family.end}ye"
    history = {"role": "assistant", "content": "five"}
    assert trained([ASKED, history, AGAIN, sampled], tokenizer) == f"four{family.end}"
    chats = render_chats([[ASKED, sampled, AGAIN, cut]], tokenizer)
    assert int(chats.masks.response[0].sum()) == len(sampled["token_ids"]) + 2
    assert tokenizer.decode(chats.tokens.response[0]).startswith(f"four{family.end}")


def test_an_answer_without_ids_is_trained_as_the_template_writes_it(family: Family, tokenizer: Any) -> None:
    message = {"role": "assistant", "content": "four", "sampled": True}
    if family is FAMILIES["DeepSeek-R1"]:  # the policy's thoughts were opened for it, and nobody knows them
        with pytest.raises(ValueError, match="token_ids"):
            render([ASKED, message], tokenizer)
        return
    assert trained([ASKED, message, AGAIN], tokenizer).endswith(f"four{family.end}")


@pytest.mark.parametrize("role", ["system", "tool"])
def test_roles_that_the_template_does_not_write_are_refused(family: Family, tokenizer: Any, role: str) -> None:
    if role in family.roles:
        require_roles(tokenizer, [role])
        return
    with pytest.raises(UserError, match=role):
        require_roles(tokenizer, [role])
