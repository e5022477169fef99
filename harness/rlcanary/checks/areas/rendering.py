"""Rendering: the ids of a conversation are the chat template's, and exactly the sampled tokens are trained."""

from collections.abc import Iterator
from typing import Any

from torch import Generator

from rlcanary.checks.check import check
from rlcanary.checks.literal import Written, written
from rlcanary.checks.subject import Call, Subject
from rlcanary.tiny_models import BOS_ID, EOS_ID, tiny_chat_tokenizer

Message = dict[str, Any]

TOKENIZER = ("tiny_chat_tokenizer()", "from rlcanary.tiny_models import tiny_chat_tokenizer")
# Text that a template writes after the last end of turn belongs to no turn; a rendering may omit it.
IDS = f"(lambda ids: ids[: len(ids) - ids[::-1].index({EOS_ID})] if {EOS_ID} in ids else ids)([int(i) for i in output[0]])"
TRAINED = "[int(token) for token, trained in zip(*output) if trained]"
PLACES = "[place for place, trained in enumerate(output[1]) if trained]"


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


def _conversations() -> Iterator[list[Message]]:
    yield [QUESTION, ANSWER]
    yield [SYSTEM, QUESTION, ANSWER]
    yield [QUESTION, _sampled("")]
    yield [_user("é ∑ 你好"), _sampled("ñ 👍\n\nyes ")]
    yield [SYSTEM, QUESTION, _history("yes"), _user("sure?"), ANSWER]
    yield [QUESTION, _sampled("ask"), TOOL, _sampled("hello"), OTHER_TOOL, ANSWER]


def _told(messages: list[Message]) -> str:
    """Join the roles of a conversation into a label for its case."""
    return ", ".join("sampled" if message.get("sampled") else message["role"] for message in messages)


def _tokenizer() -> Written:
    return written(*TOKENIZER)


def _render(subject: Subject, messages: list[Message]) -> Call:
    return subject.call("render", messages, _tokenizer())


def _template(messages: list[Message], tokenizer: Any, generation_prompt: bool = False) -> list[int]:
    """Return the template's ids up to the last end of turn, or to the start of the assistant's next turn."""
    ids = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False, add_generation_prompt=generation_prompt
    )
    return list(ids) if generation_prompt else list(ids[: len(ids) - ids[::-1].index(EOS_ID)])


def _turns(messages: list[Message], tokenizer: Any) -> list[tuple[int, int]]:
    """Return start and end of each sampled turn in the template's ids, with its end-of-turn token."""
    return [
        (len(_template(messages[:index], tokenizer, True)), len(_template(messages[: index + 1], tokenizer)))
        for index, message in enumerate(messages)
        if message.get("sampled")
    ]


@check("rendering.is_the_template", needs=("render",))
def is_the_template(subject: Subject, rng: Generator) -> None:
    """The ids of a conversation are those of the tokenizer's own chat template, turn by turn.

    Silent because a model reads any text: with a turn missing, a header too many or the raw prompt instead of the
    template, the trainer scores completions under another context than the sampler's. Look for prompts that are encoded
    without the template, for a generation prompt that is still there when a tool's turn follows, and for prefixes that are
    cut off before they are final.
    """
    tokenizer = tiny_chat_tokenizer()
    for messages in _conversations():
        with subject.case(_told(messages)):
            call = _render(subject, messages)
            expected = _template(messages, tokenizer)
            call.expect_equal(IDS, expected, "the ids are not those of the chat template")
            line_break = tokenizer.encode("\n", add_special_tokens=False)
            call.expect_equal(
                f"[int(token) for token in output[0]][{len(expected)}:] in ([], {line_break})",
                True,
                "behind the last end of turn stands something that the template does not write",
            )


@check("rendering.one_bos", needs=("render",))
def one_bos(subject: Subject, rng: Generator) -> None:
    """A conversation has exactly one BOS, at the start.

    Silent because a second BOS only costs a little reward. The template writes one and the tokenizer adds
    another. Look for a templated string that is encoded with `add_special_tokens=True`, in training or in the engine.
    """
    for messages in _conversations():
        with subject.case(_told(messages)):
            call = _render(subject, messages)
            places = f"[place for place, token in enumerate(output[0]) if token == {BOS_ID}]"
            call.expect_equal(places, [0], "the places of BOS are not the first alone")


@check("rendering.system_prompt", needs=("render",))
def system_prompt(subject: Subject, rng: Generator) -> None:
    """The ids contain the system prompt, under its own role.

    Silent because the model answers without it: it is trained on another prompt than the one it is evaluated on. Look
    for messages built without the configured system prompt, and for one that is stored and never used.
    """
    tokenizer = tiny_chat_tokenizer()
    for messages in ([SYSTEM, QUESTION, ANSWER], [{**SYSTEM, "content": "answer in French"}, QUESTION, ANSWER]):
        with subject.case(_told(messages)):
            call = _render(subject, messages)
            system = _template(messages[:1], tokenizer)
            call.expect_equal(
                f"[int(token) for token in output[0]][:{len(system)}]",
                system,
                "the ids do not begin with the system prompt",
            )


@check("rendering.tool_turns", needs=("render",))
def tool_turns(subject: Subject, rng: Generator) -> None:
    """The ids contain a tool's answer, with its content and the template's tool role, and it is not trained.

    Silent because a conversation with a wrong role or an empty answer is still plausible: the model learns a format
    that it will not meet, or learns to continue without the answer. Look for branches on the tool format that are never
    taken, for fields with other names, and for headers that pile up between the turns.
    """
    tokenizer = tiny_chat_tokenizer()
    for messages in (
        [QUESTION, _sampled("ask"), TOOL, ANSWER],
        [QUESTION, _sampled("ask"), TOOL, OTHER_TOOL, _sampled("yes")],
        [QUESTION, _sampled("ask"), OTHER_TOOL, _sampled("hello"), TOOL, ANSWER],
        [QUESTION, _sampled("ask"), {**TOOL, "content": ""}, ANSWER],
    ):
        with subject.case(_told(messages)):
            call = _render(subject, messages)
            call.expect_equal(IDS, _template(messages, tokenizer), "the ids are not those of the chat template")
            for index, message in enumerate(messages):
                if message["role"] == "tool":
                    start, end = (
                        len(_template(messages[:index], tokenizer)),
                        len(_template(messages[: index + 1], tokenizer)),
                    )
                    told = "tokens of the tool's turn are trained"
                    call.expect_equal(f"any(output[1][{start}:{end}])", False, told)


@check("rendering.only_sampled_turns_are_trained", needs=("render",))
def only_sampled_turns_are_trained(subject: Subject, rng: Generator) -> None:
    """Only the tokens that this rollout sampled are trained: no earlier assistant turns, headers or other messages.

    Silent because assistant turns of the history are good text; but they have no sampler logprobs, so that their ratio
    is exp(logprob - 0), and a prefix shared by several branches is trained once per branch. Look for masks made from
    `role == "assistant"` or from a search for the text.
    """
    tokenizer = tiny_chat_tokenizer()
    history = [
        [QUESTION, _history("four"), _user("sure?"), ANSWER],
        [QUESTION, _sampled("yes"), _user("sure?"), _history("yes"), _user("really?"), _sampled("yes")],
        [QUESTION, _history("yes")],
    ]
    for messages in (*_conversations(), *history):
        with subject.case(_told(messages)):
            call = _render(subject, messages)
            turns = _turns(messages, tokenizer)
            tokens = tokenizer.convert_ids_to_tokens(_template(messages, tokenizer))
            # Another check tests whether the end of turn is trained.
            ends = [end - 1 for _, end in turns]
            call.expect_equal(
                "[(place, arguments[1].convert_ids_to_tokens(int(token))) "
                f"for place, (token, trained) in enumerate(zip(*output)) if trained and place not in {ends}]",
                [(place, tokens[place]) for start, end in turns for place in range(start, end - 1)],
                "the tokens that are trained are not those of the sampled turns",
            )


@check("rendering.end_of_turn_is_trained", needs=("render",))
def end_of_turn_is_trained(subject: Subject, rng: Generator) -> None:
    """The end-of-turn token of each sampled turn is trained, and the template's text after it is not.

    Silent because a policy that gets no gradient for ending its turn runs into the token limit, a little more each step;
    and the line break behind it was never sampled. Look for masks that stop before the end-of-turn token or run to the
    next header.
    """
    tokenizer = tiny_chat_tokenizer()
    for messages in _conversations():
        with subject.case(_told(messages)):
            call = _render(subject, messages)
            ends = [end - 1 for _, end in _turns(messages, tokenizer)]
            call.expect_equal(
                f"[place for place, (token, trained) in enumerate(zip(*output)) if trained and token == {EOS_ID}]",
                ends,
                "other ends of turn are trained",
            )
            behind = [end + 1 for end in ends]
            call.expect_equal(
                f"[place for place in {PLACES} if place in {behind}]",
                [],
                "what stands behind an end of turn is trained",
            )


@check("rendering.sampled_tokens_as_they_are", needs=("render",))
def sampled_tokens_as_they_are(subject: Subject, rng: Generator) -> None:
    """Sampled ids, if known, are used as they are and trained; text is not encoded again.

    Silent because the text is the same: "hello" sampled letter by letter encodes to one id, and its logprobs, its mask and
    every later turn are then those of other tokens. Look for a conversation that is rendered anew from text after each
    tool call.
    """
    tokenizer = tiny_chat_tokenizer()
    letters: dict[str, list[int]] = {
        word: [*tokenizer.convert_tokens_to_ids(list(word)), EOS_ID] for word in ("hello", "four")
    }
    hello, four = _sampled("hello", letters["hello"]), _sampled("four", letters["four"])
    for messages in ([QUESTION, hello], [QUESTION, hello, TOOL, four]):
        with subject.case(_told(messages)):
            call = _render(subject, messages)
            sampled = [token for message in messages if message.get("sampled") for token in message["token_ids"]]
            call.expect_equal(TRAINED, sampled, "other ids are trained than those that were sampled")
            call.expect_equal(
                IDS, _spliced(messages, tokenizer), "the sampled ids do not stand in the template's place"
            )


def _spliced(messages: list[Message], tokenizer: Any) -> list[int]:
    """Return the template's ids with the sampled ids in place of the sampled turns."""
    whole = _template(messages, tokenizer)
    turns = _turns(messages, tokenizer)
    sampled = [message["token_ids"] for message in messages if message.get("sampled")]
    for (start, end), ids in reversed(list(zip(turns, sampled, strict=True))):
        whole[start:end] = ids
    return whole


@check("rendering.truncated_turn", needs=("render",))
def truncated_turn(subject: Subject, rng: Generator) -> None:
    """The end-of-turn token that the template adds to a truncated turn is not trained, because it was not sampled.

    Silent because it looks like any other end of turn: the policy is taught to stop where the token limit cut it. Look
    for masks that run to the end-of-turn token without testing whether it was sampled.
    """
    tokenizer = tiny_chat_tokenizer()
    cut: list[int] = tokenizer.convert_tokens_to_ids(list("hel"))
    for messages in ([QUESTION, _sampled("hel", cut)], [QUESTION, _sampled("hel", cut), TOOL, ANSWER]):
        with subject.case(_told(messages)):
            call = _render(subject, messages)
            start, _ = _turns(messages, tokenizer)[0]
            call.expect_equal(
                f"[place for place in {PLACES} if place <= {start + len(cut)}]",
                list(range(start, start + len(cut))),
                "the places that are trained are not those of the three tokens that were sampled",
            )


@check("rendering.grows_by_appending", needs=("render",))
def grows_by_appending(subject: Subject, rng: Generator) -> None:
    """Adding turns only appends: the ids so far stay the same, and trained tokens stay trained.

    Silent because each rendering is right by itself: if an earlier turn is rendered differently once another follows,
    its sampled logprobs belong to other tokens. Look for templates that strip the reasoning of earlier turns, and for
    truncation from the left. (The checks' template writes every turn the same way.)
    """
    messages = [SYSTEM, QUESTION, _sampled("ask"), TOOL, _sampled("hello"), _user("sure?"), ANSWER]
    for end in (3, 5):
        with subject.case(f"{end} messages"):
            short = _render(subject, messages[:end])
            ids = list(short.output[0])
            kept = len(ids) - ids[::-1].index(EOS_ID) if EOS_ID in ids else len(ids)
            call = _render(subject, messages)
            shorter = f"adapter.render(arguments[0][:{end}], arguments[1])"
            for part, told in ((0, "ids"), (1, "trained tokens")):
                same = f"list(output[{part}])[:{kept}] == list({shorter}[{part}])[:{kept}]"
                call.expect_equal(
                    same, True, f"with more turns behind them, the first {end} messages have other {told}"
                )


@check("rendering.one_flag_per_token", needs=("render",))
def one_flag_per_token(subject: Subject, rng: Generator) -> None:
    """The result has one flag per id.

    Silent because a mask that is one short gets padded, and then marks the neighbouring tokens. Look for masks that are
    built from pieces which were encoded apart.
    """
    for messages in _conversations():
        with subject.case(_told(messages)):
            call = _render(subject, messages)
            call.expect_equal("len(output[1]) == len(output[0])", True, "there are not as many flags as ids")


@check("rendering.inputs_untouched", needs=("render",))
def inputs_untouched(subject: Subject, rng: Generator) -> None:
    """Rendering does not modify the messages.

    Silent because the messages are rendered again for the next turn, for evaluation and for the log. Look for `pop` and
    for a system prompt that is inserted in place, once per rendering.
    """
    messages = [SYSTEM, QUESTION, _sampled("ask"), TOOL, ANSWER]
    call = _render(subject, messages)
    call.expect_equal("arguments[0]", messages, "the messages changed")
