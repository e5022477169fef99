"""Rewards: each completion is scored by its own item's function, and a missing reward is not zero."""

from collections.abc import Sequence

from torch import Generator

from rlcanary.checks.check import check
from rlcanary.checks.literal import Written, written
from rlcanary.checks.subject import Subject

IMPORTS = "from time import sleep\nfrom rlcanary.contract.adapter import Item"
VALUES = "[str(round(float(reward), 4)) for reward in output]"


def _items(rewards: Sequence[str], ids: str = "abcdefgh") -> Written:
    """Make items with these reward functions, each written as Python."""
    lines = [f"    Item({name!r}, [11], {reward})," for name, reward in zip(ids, rewards, strict=False)]
    return written("\n".join(["[", *lines, "]"]), IMPORTS)


def _told(rewards: Sequence[float]) -> list[str]:
    return [str(round(float(reward), 4)) for reward in rewards]


@check("reward.one_per_completion", needs=("score",))
def one_per_completion(subject: Subject, rng: Generator) -> None:
    """Each completion gets one reward, in order, with the value that the reward function returned.

    Silent because rewards that are rounded to 0 and 1, cut off below zero or cast to integers still rank some completions
    above others. Look at the dtype of the tensor that collects them, at clamps, and at comparisons such as `reward == 1`.
    """
    for values in ([1.0], [0.5, 1.0], [-3.5, 0.25, 1000000.0, 0.0, 0.9, -0.001]):
        with subject.case(f"{len(values)} completions"):
            call = subject.call("score", _items(["float"] * len(values)), [str(value) for value in values])
            call.expect_equal(VALUES, _told(values), "the reward is the number in the text, another one came back")
    call = subject.call("score", _items(["{'all': 3, 'yes': True, 'half': 0.5}.get"] * 3), ["all", "yes", "half"])
    call.expect_equal(VALUES, ["3.0", "1.0", "0.5"], "rewards that are int, bool and float were not kept as numbers")


@check("reward.zero_is_not_none", needs=("score",))
def zero_is_not_none(subject: Subject, rng: Generator) -> None:
    """A reward of 0.0 stays 0.0 and a reward of None becomes NaN.

    Silent because both are falsy: under `or`, a wrong answer gets the default or another completion's reward, and with
    None as zero a completion that could not be scored counts as wrong. Look for `reward or …`, `if reward`, and for
    lists that leave out None.
    """
    judged = "{'right': 1.0, 'wrong': 0.0, 'harmful': -1.0}.get"
    told = {"right": "1.0", "wrong": "0.0", "harmful": "-1.0", "not a verdict": "nan"}
    for texts in (
        ["wrong"],
        ["not a verdict"],
        ["wrong", "right"],
        ["right", "not a verdict", "wrong", "harmful", "wrong"],
    ):
        with subject.case(*texts):
            call = subject.call("score", _items([judged] * len(texts)), texts)
            call.expect_equal(
                VALUES, [told[text] for text in texts], "rewards of 0.0, negative rewards or None were changed"
            )


@check("reward.failure_is_not_zero", needs=("score",))
def failure_is_not_zero(subject: Subject, rng: Generator) -> None:
    """If the reward function raises, the reward is NaN or the whole call raises; other rewards are not affected.

    Silent because an exception counted as 0 is indistinguishable from a wrong answer: a parser that fails on every long
    completion teaches the policy to be short. And a failure that appends twice, or not at all, hands every later
    completion its neighbour's reward. Look for `except: return 0.0`, and for an append in both `try` and `except`.
    """
    for texts in (["oops"], ["1.0", "oops", "0.5"], ["oops", "1.0", "oops", "0.25", "0.75"]):
        with subject.case(*texts):
            call = subject.call_unless_raised("score", _items(["float"] * len(texts)), texts)
            if call is not None:
                told = ["nan" if text == "oops" else str(float(text)) for text in texts]
                call.expect_equal(
                    VALUES,
                    told,
                    "the reward function raised on 'oops', which is neither a reward nor another's",
                    may_raise=True,
                )


@check("reward.own_function", needs=("score",))
def own_function(subject: Subject, rng: Generator) -> None:
    """Equal completions of different items are each scored by their own item's function.

    Silent because "4" is right for one prompt and wrong for the next, and short answers repeat all the time. Look for
    caches and dictionaries keyed by the text, and for a reward function that is taken from the first item of a batch.
    """
    functions = ["{'4': 1.0}.get", "{'4': 0.25}.get", "{'4': 1.0}.get", "{'4': -1.0}.get"]
    call = subject.call("score", _items(functions), ["4"] * 4)
    call.expect_equal(VALUES, ["1.0", "0.25", "1.0", "-1.0"], "equal texts of different items got each other's reward")
    # The completions of a group share one item.
    call = subject.call("score", _items(["float"] * 4, "aabb"), ["1.0", "0.0", "0.5", "0.25"])
    call.expect_equal(VALUES, ["1.0", "0.0", "0.5", "0.25"], "completions of one item got each other's reward")


@check("reward.slow_functions", needs=("score",))
def slow_functions(subject: Subject, rng: Generator) -> None:
    """A slow reward function does not change the order of the rewards.

    Silent because every reward arrives, only in another order: a completion that is slow to verify gets the reward of a
    quick one. Look for `as_completed`, `imap_unordered` and queues in the pool that runs the verifiers.
    """
    slow = "lambda text: sleep(0.03) or float(text)"
    call = subject.call("score", _items([slow, "float", "float"]), ["1.0", "0.5", "0.25"])
    call.expect_equal(VALUES, ["1.0", "0.5", "0.25"], "the first reward took 30 ms, and rewards changed places")


@check("reward.text_as_sampled", needs=("score",))
def text_as_sampled(subject: Subject, rng: Generator) -> None:
    """The reward function sees each completion once, in full, exactly as sampled.

    Silent because most answers survive being stripped, split or lowercased, but formats do not: a leading line break, a
    tag, an accent is lost. A reward summed over lines or parts grows with their number, so that a long wrong answer
    beats a short right one. Look for `strip()`, `splitlines()`, and for the prompt put in front.
    """
    for text in ("4", " 4\n", "a\n\nb", "", "<|end|>4", "e\N{COMBINING ACUTE ACCENT}", "Yes", "a" * 300):
        with subject.case(repr(text)[:20]):
            call = subject.call("score", _items([f"{{{text!r}: 1.0}}.get"]), [text])
            call.expect_equal(VALUES, ["1.0"], "the reward function knows this text and was given another one")
            call = subject.call("score", _items(["len"]), [text])
            call.expect_equal(
                VALUES, [str(float(len(text)))], "the reward is the length of the text, another one came back"
            )


@check("reward.no_memory", needs=("score",))
def no_memory(subject: Subject, rng: Generator) -> None:
    """A completion's reward is the same alone, among others, and on a second call.

    Silent because a running mean, a normalisation over the batch or a list that keeps the rewards of the last call all
    give numbers of the right size. Look for state that outlives the call and for default arguments that collect.
    """
    texts = ["1.0", "0.0", "0.5"]
    before = subject.call("score", _items(["float"] * 3), texts)
    before.expect_equal(VALUES, texts, "among others, a completion has another reward than its function gives")
    for text in texts:
        with subject.case(text):
            call = subject.call("score", _items(["float"]), [text])
            call.expect_equal(
                VALUES, [text], "after other completions were scored, a completion has another reward", before=before
            )
    call = subject.call("score", _items(["float"] * 3), texts)
    call.expect_equal(VALUES, texts, "asked for again, the rewards are others", before=before)


@check("reward.inputs_untouched", needs=("score",))
def inputs_untouched(subject: Subject, rng: Generator) -> None:
    """Scoring does not modify the lists of items and completions.

    Silent because the rewards are right, but the logger and the trainer use the lists afterwards: popped, sorted or
    filtered, they no longer match the rewards. Look for `pop`, `sort` and `remove`.
    """
    texts = [" 0.5\n", "oops", "1.0"]
    call = subject.call_unless_raised("score", _items(["float"] * 3), texts)
    if call is not None:
        call.expect_equal("arguments[1]", texts, "the list of completions changed", may_raise=True)
        call.expect_equal(
            "[item.id for item in arguments[0]]", ["a", "b", "c"], "the list of items changed", may_raise=True
        )
