"""Rendering: the template's ids, with exactly the sampled tokens trained."""

import pytest

from rlcanary.reference.data.rendering import render
from rlcanary.tiny_models import BOS_ID, EOS_ID, tiny_chat_tokenizer

USER = {"role": "user", "content": "2+2?"}
SAMPLED = {"role": "assistant", "content": "four", "sampled": True}
TOOL = {"role": "tool", "content": "42 rows"}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_chat_tokenizer()


def trained_text(messages, tokenizer):
    ids, trained = render(messages, tokenizer)
    return tokenizer.decode([token for token, flag in zip(ids, trained, strict=True) if flag])


def test_ids_are_those_of_the_template(tokenizer):
    messages = [{"role": "system", "content": "be brief"}, USER, SAMPLED, TOOL, SAMPLED]
    ids, trained = render(messages, tokenizer)
    assert ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert len(trained) == len(ids)


def test_sampled_turns_are_trained_with_their_end_and_nothing_else(tokenizer):
    history = {"role": "assistant", "content": "four"}
    assert trained_text([USER, history, USER, SAMPLED, TOOL, SAMPLED], tokenizer) == "four<|end|>four<|end|>"


def test_conversation_without_a_sampled_turn_trains_nothing(tokenizer):
    assert trained_text([USER, {"role": "assistant", "content": "four"}], tokenizer) == ""


def test_empty_sampled_turn_trains_its_end(tokenizer):
    assert trained_text([USER, {**SAMPLED, "content": ""}], tokenizer) == "<|end|>"


def test_sampled_ids_stand_as_they_are(tokenizer):
    letters = [*tokenizer.convert_tokens_to_ids(list("four")), EOS_ID]
    ids, trained = render([USER, {**SAMPLED, "token_ids": letters}, TOOL, SAMPLED], tokenizer)
    first = trained.index(True)
    assert ids[first : first + 5] == letters
    assert tokenizer.decode(ids) == tokenizer.decode(render([USER, SAMPLED, TOOL, SAMPLED], tokenizer)[0])


def test_end_of_a_truncated_turn_is_the_templates(tokenizer):
    cut = tokenizer.convert_tokens_to_ids(list("fo"))
    ids, trained = render([USER, {**SAMPLED, "token_ids": cut}], tokenizer)
    first = trained.index(True)
    assert ids[first : first + 3] == [*cut, EOS_ID]
    assert trained[first : first + 3] == [True, True, False]


def test_turn_without_any_sampled_id_trains_nothing(tokenizer):
    assert trained_text([USER, {**SAMPLED, "content": "", "token_ids": []}], tokenizer) == ""


def test_sampled_message_of_another_role_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"message 0 .* role 'user'"):
        render([{**USER, "sampled": True}], tokenizer)


def test_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    rewriting = tiny_chat_tokenizer()
    rewriting.chat_template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content if loop.last else '…' }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    with pytest.raises(ValueError, match="when later messages"):
        render([USER, SAMPLED, TOOL, SAMPLED], rewriting)


def test_template_without_an_end_of_turn_is_refused():
    endless = tiny_chat_tokenizer()
    endless.chat_template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}assistant\n"
    endless.chat_template = endless.chat_template.replace(
        "assistant\n", "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    with pytest.raises(ValueError, match="does not end message 1"):
        render([USER, SAMPLED], endless)


def test_tiny_tokenizer_encodes_a_spelled_word_otherwise_than_it_was_sampled(tokenizer):
    letters = tokenizer.convert_tokens_to_ids(list("hello"))
    assert len(letters) == 5
    assert tokenizer.decode(letters) == "hello"
    assert len(tokenizer.encode("hello", add_special_tokens=False)) == 1


def test_tiny_tokenizer_adds_a_second_bos_where_the_templates_text_is_encoded(tokenizer):
    text = tokenizer.apply_chat_template([USER], tokenize=False)
    assert tokenizer.encode(text)[:2] == [BOS_ID, BOS_ID]
