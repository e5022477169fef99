"""Rendering: the ids of a conversation are the chat template's, and exactly the sampled tokens are trained."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from rlcanary.checks.asserts import assert_equal, assert_true
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.contract.adapter import Adapter
from rlcanary.tiny_models import BOS_ID, EOS_ID, PAD_ID, tiny_chat_tokenizer

Message = Mapping[str, Any]
Messages = list[Message]
Tools = list[Mapping[str, Any]]


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _history(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _sampled(content: str, token_ids: list[int] | None = None) -> Message:
    message = {"role": "assistant", "content": content, "sampled": True}
    return message if token_ids is None else {**message, "token_ids": token_ids}


SYSTEM: Message = {"role": "system", "content": "be brief"}
TOOL: Message = {"role": "tool", "content": "42 rows"}
OTHER_TOOL: Message = {"role": "tool", "content": "no such table"}
QUESTION, ANSWER = _user("2+2?"), _sampled("four")


def _case(*messages: Message) -> Case:
    """Make a case of a conversation, labelled with its roles."""
    return Case(*("sampled" if each.get("sampled") else each["role"] for each in messages), messages=list(messages))


def _conversations() -> Iterator[Case]:
    yield _case(QUESTION, ANSWER)
    yield _case(SYSTEM, QUESTION, ANSWER)
    yield _case(QUESTION, _sampled(""))
    yield _case(_user("é ∑ 你好"), _sampled("ñ 👍\n\nyes "))
    yield _case(SYSTEM, QUESTION, _history("yes"), _user("sure?"), ANSWER)
    yield _case(QUESTION, _sampled("ask"), TOOL, _sampled("hello"), OTHER_TOOL, ANSWER)
    # Texts that code likes to parse or strip.
    thought, padded = _sampled("<think>x</think>four"), _sampled("  four\n")
    yield Case("thoughts and blanks", messages=[QUESTION, thought, _user("sure?"), padded, _user("really?"), ANSWER])


def _render(adapter: Adapter, messages: Messages, tokenizer: Any, *tools: Tools) -> tuple[list[int], list[int]]:
    """Return the ids of a conversation, and the places of those that are trained."""
    ids, flags = adapter.render(copy.deepcopy(messages), tokenizer, *copy.deepcopy(tools))
    places = [place for place, (_, flag) in enumerate(zip(ids, flags, strict=False)) if flag]
    return [int(token) for token in ids], places


def _to_last_end(ids: list[int]) -> list[int]:
    """Cut off what follows the last end of turn: it belongs to no turn, and a rendering may omit it."""
    return ids[: len(ids) - ids[::-1].index(EOS_ID)] if EOS_ID in ids else ids


def _template(
    messages: Messages, tokenizer: Any, generation_prompt: bool = False, tools: Tools | None = None
) -> list[int]:
    """Return the template's ids up to the last end of turn, or to the start of the assistant's next turn."""
    ids = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=False, add_generation_prompt=generation_prompt
    )
    return list(ids) if generation_prompt else _to_last_end(list(ids))


def _turns(messages: Messages, tokenizer: Any) -> list[tuple[int, int]]:
    """Return start and end of each sampled turn in the template's ids, with its end-of-turn token."""
    return [
        (len(_template(messages[:index], tokenizer, True)), len(_template(messages[: index + 1], tokenizer)))
        for index, message in enumerate(messages)
        if message.get("sampled")
    ]


def _templates() -> Iterator[Case]:
    yield from _conversations()
    blanks = [{**SYSTEM, "content": " be brief\n"}, _user("  2+2?\n"), _history(" four\n"), _user("sure?\n"), ANSWER]
    yield Case("a template that trims", messages=blanks, rewrites_contents=True)
    # The opening of the second one stood in its prompt.
    for thoughts in ("<think>\nx\n</think>\n\nfour", "x\n</think>\n\nfour"):
        messages = [QUESTION, _history(thoughts), _user("sure?"), ANSWER]
        yield Case("a template that writes thoughts anew", messages=messages, rewrites_contents=True)


@check("rendering.is_the_template", needs=("render",), cases=_templates)
def is_the_template(adapter: Adapter, messages: Messages, rewrites_contents: bool = False) -> None:
    """The ids of a conversation are those of the tokenizer's own chat template, turn by turn.

    Silent because a model reads any text: with a turn missing, a header too many or the raw prompt instead of the
    template, the trainer scores completions under another context than the sampler's. Look for prompts that are encoded
    without the template, for a generation prompt that is still there when a tool's turn follows, for prefixes that are
    cut off before they are final, and for code that writes roles and contents by itself where the template trims them or
    writes thoughts in a form of its own.
    """
    tokenizer = tiny_chat_tokenizer(rewrites_contents=rewrites_contents)
    (ids, _), expected = _render(adapter, messages, tokenizer), _template(messages, tokenizer)
    assert_equal(_to_last_end(ids), expected, "the ids are not those of the chat template")
    line_break = tokenizer.encode("\n", add_special_tokens=False)
    told = "behind the last end of turn stands something that the template does not write"
    assert_true(ids[len(expected) :] in ([], line_break), told, quantity="data")


@check("rendering.one_bos", needs=("render",), cases=_conversations)
def one_bos(adapter: Adapter, messages: Messages) -> None:
    """A conversation has exactly one BOS, at the start.

    Silent because a second BOS only costs a little reward. The template writes one and the tokenizer adds
    another. Look for a templated string that is encoded with `add_special_tokens=True`, in training or in the engine.
    """
    ids, _ = _render(adapter, messages, tiny_chat_tokenizer())
    places = [place for place, token in enumerate(ids) if token == BOS_ID]
    assert_equal(places, [0], "the places of BOS are not the first alone")


def _system_prompts() -> Iterator[Case]:
    for system in (SYSTEM, {**SYSTEM, "content": "answer in French"}):
        yield _case(system, QUESTION, ANSWER)


@check("rendering.system_prompt", needs=("render",), cases=_system_prompts)
def system_prompt(adapter: Adapter, messages: Messages) -> None:
    """The ids contain the system prompt, under its own role.

    Silent because the model answers without it: it is trained on another prompt than the one it is evaluated on. Look
    for messages built without the configured system prompt, and for one that is stored and never used.
    """
    tokenizer = tiny_chat_tokenizer()
    (ids, _), system = _render(adapter, messages, tokenizer), _template(messages[:1], tokenizer)
    assert_equal(ids[: len(system)], system, "the ids do not begin with the system prompt")


def _tool_answers() -> Iterator[Case]:
    ask = _sampled("ask")
    yield _case(QUESTION, ask, TOOL, ANSWER)
    yield _case(QUESTION, ask, TOOL, OTHER_TOOL, _sampled("yes"))
    yield _case(QUESTION, ask, OTHER_TOOL, _sampled("hello"), TOOL, ANSWER)
    yield _case(QUESTION, ask, {**TOOL, "content": ""}, ANSWER)
    yield from _merged_tool_answers()


def _merged_tool_answers() -> Iterator[Case]:
    """Conversations in which a template writes the answers of all tools of a turn as one turn."""
    ask = _sampled("ask")
    for tools in ([TOOL], [TOOL, OTHER_TOOL], [OTHER_TOOL, TOOL, OTHER_TOOL]):
        messages = [SYSTEM, QUESTION, ask, *tools, _sampled("hello"), TOOL, ANSWER]
        yield Case(f"{len(tools)} answers in one turn", messages=messages, merges_tools=True)


@check("rendering.tool_turns", needs=("render",), cases=_tool_answers)
def tool_turns(adapter: Adapter, messages: Messages, merges_tools: bool = False) -> None:
    """The ids contain the tools' answers, with their content and in the template's turns, and they are not trained.

    Silent because a conversation with a wrong role or an empty answer is still plausible: the model learns a format
    that it will not meet, or learns to continue without the answer. Look for branches on the tool format that are never
    taken, for fields with other names, for headers that pile up between the turns, and for messages that are templated
    one by one where the template writes all answers of a turn as one (Qwen).
    """
    tokenizer = tiny_chat_tokenizer(merges_tools)
    ids, trained = _render(adapter, messages, tokenizer)
    assert_equal(_to_last_end(ids), _template(messages, tokenizer), "the ids are not those of the chat template")
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            start, end = (len(_template(messages[:each], tokenizer)) for each in (index, index + 1))
            assert_equal(
                [place for place in trained if start <= place < end], [], "tokens of the tool's turn are trained"
            )


def _offered_tools() -> Iterator[Case]:
    search, add = (
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": parameters}}}
        for name, parameters in (
            ("search", {"query": {"type": "string"}}),
            ("add", {"a": {"type": "integer"}, "b": {"type": "integer"}}),
        )
    )
    ask = _sampled("ask")
    yield Case("one tool", messages=[QUESTION, ANSWER], tools=[search])
    yield Case("two tools", messages=[SYSTEM, QUESTION, ask, TOOL, ANSWER], tools=[search, add])
    yield Case("the other order", messages=[SYSTEM, QUESTION, ask, TOOL, ANSWER], tools=[add, search])
    yield Case("no tools", messages=[QUESTION, ANSWER], tools=[])


@check("rendering.offered_tools", needs=("render",), cases=_offered_tools)
def offered_tools(adapter: Adapter, messages: Messages, tools: Tools) -> None:
    """The tools that the policy is offered stand where the chat template writes them, and the same tokens are trained.

    Silent because the conversation reads well without them: the sampler saw the tools and the trainer scores the calls
    as if nobody had offered any, or the policy never hears of a tool. Look for a call of `apply_chat_template` without
    `tools`, for schemas that are written in another order or form than at sampling, and for a mask that is built without
    them and put over ids that have them.
    """
    tokenizer = tiny_chat_tokenizer()
    ids, trained = _render(adapter, messages, tokenizer, tools)
    expected = _template(messages, tokenizer, tools=tools)
    assert_equal(_to_last_end(ids), expected, "the ids are not those of the chat template with these tools")
    # The template writes the tools in front of the conversation.
    moved = len(expected) - len(_template(messages, tokenizer))
    before = [place + moved for place in _render(adapter, messages, tokenizer)[1]]
    assert_equal(trained, before, "with tools offered, other tokens are trained")


def _histories() -> Iterator[Case]:
    yield from _conversations()
    yes, sure = _sampled("yes"), _user("sure?")
    yield _case(QUESTION, _history("four"), sure, ANSWER)
    yield _case(QUESTION, _sampled("four"), sure, ANSWER)  # the same text, of which more was sampled
    yield _case(QUESTION, yes, sure, _history("yes"), _user("really?"), yes)
    yield _case(QUESTION, _history("yes"))
    tool = {"role": "tool", "content": "42 rows"}
    yield _case(QUESTION, _history("yes"), tool, ANSWER)  # of one round, whose first turn another rollout sampled
    yield _case(QUESTION, _history("yes"), tool, _history("yes"), tool, _user("sure?"), ANSWER)
    yield from _merged_tool_answers()


@check("rendering.only_sampled_turns_are_trained", needs=("render",), cases=_histories)
def only_sampled_turns_are_trained(adapter: Adapter, messages: Messages, merges_tools: bool = False) -> None:
    """Only the tokens that this rollout sampled are trained: no earlier assistant turns, headers or other messages.

    Silent because assistant turns of the history are good text; but they have no sampler logprobs, so that their ratio
    is exp(logprob - 0), and a prefix shared by several branches is trained once per branch. Look for masks made from
    `role == "assistant"` or from a search for the text.
    """
    tokenizer = tiny_chat_tokenizer(merges_tools)
    ids, trained = _render(adapter, messages, tokenizer)
    words, expected = map(tokenizer.convert_ids_to_tokens, (ids, _template(messages, tokenizer)))
    turns = _turns(messages, tokenizer)
    # Another check tests whether the end of turn is trained.
    ends = [end - 1 for _, end in turns]
    got = [(place, words[place]) for place in trained if place not in ends]
    wanted = [(place, expected[place]) for start, end in turns for place in range(start, end - 1)]
    assert_equal(got, wanted, "the tokens that are trained are not those of the sampled turns")


@check("rendering.end_of_turn_is_trained", needs=("render",), cases=_conversations)
def end_of_turn_is_trained(adapter: Adapter, messages: Messages) -> None:
    """The end-of-turn token of each sampled turn is trained, and the template's text after it is not.

    Silent because a policy that gets no gradient for ending its turn runs into the token limit, a little more each step;
    and the line break behind it was never sampled. Look for masks that stop before the end-of-turn token or run to the
    next header.
    """
    tokenizer = tiny_chat_tokenizer()
    ids, trained = _render(adapter, messages, tokenizer)
    ends = [end - 1 for _, end in _turns(messages, tokenizer)]
    assert_equal([place for place in trained if ids[place] == EOS_ID], ends, "other ends of turn are trained")
    behind = [place for place in trained if place - 1 in ends]
    assert_equal(behind, [], "what stands behind an end of turn is trained")


def _spelled_turns() -> Iterator[Case]:
    tokenizer = tiny_chat_tokenizer()
    hello, four = (_sampled(word, [*tokenizer.convert_tokens_to_ids(list(word)), EOS_ID]) for word in ("hello", "four"))
    yield _case(QUESTION, hello)
    yield _case(QUESTION, hello, TOOL, four)
    # A policy may sample any id, those of padding and BOS among them.
    first, *rest = hello["token_ids"]
    odd = _sampled("hello", [first, PAD_ID, BOS_ID, *rest])
    yield Case("padding and BOS sampled", messages=[QUESTION, odd, TOOL, four])


@check("rendering.sampled_tokens_as_they_are", needs=("render",), cases=_spelled_turns)
def sampled_tokens_as_they_are(adapter: Adapter, messages: Messages) -> None:
    """Sampled ids, if known, are used as they are and trained; text is not encoded again.

    Silent because the text is the same: "hello" sampled letter by letter encodes to one id, and its logprobs, its mask and
    every later turn are then those of other tokens. Look for a conversation that is rendered anew from text after each
    tool call.
    """
    tokenizer = tiny_chat_tokenizer()
    ids, trained = _render(adapter, messages, tokenizer)
    sampled = [message["token_ids"] for message in messages if message.get("sampled")]
    told = "other ids are trained than those that were sampled"
    assert_equal([ids[place] for place in trained], [token for own in sampled for token in own], told)
    expected = _template(messages, tokenizer)
    for (start, end), own in reversed(list(zip(_turns(messages, tokenizer), sampled, strict=True))):
        expected[start:end] = own
    assert_equal(_to_last_end(ids), expected, "the sampled ids do not stand in the template's place")


def _truncated_turns() -> Iterator[Case]:
    cut = _sampled("hel", tiny_chat_tokenizer().convert_tokens_to_ids(list("hel")))
    yield _case(QUESTION, cut)
    yield _case(QUESTION, cut, TOOL, ANSWER)
    empty = _case(QUESTION, _sampled("", []), TOOL, ANSWER)
    yield Case("nothing sampled", **empty.inputs)


@check("rendering.truncated_turn", needs=("render",), cases=_truncated_turns)
def truncated_turn(adapter: Adapter, messages: Messages) -> None:
    """The end-of-turn token that the template adds to a truncated turn is not trained, because it was not sampled.

    Silent because it looks like any other end of turn: the policy is taught to stop where the token limit cut it. Look
    for masks that run to the end-of-turn token without testing whether it was sampled, and for turns behind it that lose
    a token or repeat one.
    """
    tokenizer = tiny_chat_tokenizer()
    ids, trained = _render(adapter, messages, tokenizer)
    (start, end), *later = _turns(messages, tokenizer)
    size, expected = len(messages[1]["token_ids"]), _template(messages, tokenizer)
    places = [place for place in trained if place <= start + size]
    told = f"the places that are trained are not those of the {size} tokens that were sampled"
    assert_equal(places, list(range(start, start + size)), told)
    # A rendering may end the truncated turn or leave it open.
    behind, allowed = _to_last_end(ids[start + size :]), (expected[end - 1 :], expected[end:])
    told = "behind a truncated turn stands something else than the template's end of turn and the later turns"
    assert_true(behind in allowed, told, quantity="data")
    answers = [token for first, last in later for token in expected[first:last]]
    told = "behind a truncated turn other tokens are trained than the sampled ones"
    assert_equal([ids[place] for place in trained if place > start + size], answers, told)


def _shorter() -> Iterator[Case]:
    messages = [SYSTEM, QUESTION, _sampled("ask"), TOOL, _sampled("hello"), _user("sure?"), ANSWER]
    for end in (3, 5):
        yield Case(f"{end} messages", messages=messages, end=end)
    thoughts = [QUESTION, _sampled("<think>x</think>four"), _user("sure?"), _sampled("<tool_call>{}</tool_call>"), TOOL]
    yield Case("thoughts", messages=[*thoughts, ANSWER], end=2)


@check("rendering.grows_by_appending", needs=("render",), cases=_shorter)
def grows_by_appending(adapter: Adapter, messages: Messages, end: int) -> None:
    """Adding turns only appends: the ids so far stay the same, and trained tokens stay trained.

    Silent because each rendering is right by itself: if an earlier turn is rendered differently once another follows,
    its sampled logprobs belong to other tokens. Look for templates that strip the reasoning of earlier turns, and for
    truncation from the left. (The checks' template writes every turn the same way.)
    """
    tokenizer = tiny_chat_tokenizer()
    ids, trained = _render(adapter, messages[:end], tokenizer)
    more_ids, more_trained = _render(adapter, messages, tokenizer)
    kept = len(_to_last_end(ids))
    told = f"with more turns behind them, the first {end} messages have other"
    assert_equal(more_ids[:kept], ids[:kept], f"{told} ids")
    got, before = ([place for place in each if place < kept] for each in (more_trained, trained))
    assert_equal(got, before, f"{told} trained tokens")


@check("rendering.one_flag_per_token", needs=("render",), cases=_conversations)
def one_flag_per_token(adapter: Adapter, messages: Messages) -> None:
    """The result has one flag per id.

    Silent because a mask that is one short gets padded, and then marks the neighbouring tokens. Look for masks that are
    built from pieces which were encoded apart.
    """
    ids, trained = adapter.render(messages, tiny_chat_tokenizer())
    assert_equal(len(trained), len(ids), "there are not as many flags as ids")


def _tool_conversation() -> Iterator[Case]:
    yield Case(messages=[SYSTEM, QUESTION, _sampled("ask"), TOOL, ANSWER])


@check("rendering.inputs_untouched", severity="hardening", needs=("render",), cases=_tool_conversation)
def inputs_untouched(adapter: Adapter, messages: Messages) -> None:
    """Rendering does not modify the messages.

    Silent because the messages are rendered again for the next turn, for evaluation and for the log. Look for `pop` and
    for a system prompt that is inserted in place, once per rendering.
    """
    before = copy.deepcopy(messages)
    adapter.render(messages, tiny_chat_tokenizer())
    assert_equal(messages, before, "the messages changed")
