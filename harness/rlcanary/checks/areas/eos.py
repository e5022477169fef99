"""How completions end: a sampled end of sequence is trained, a truncated completion is whole, and nothing behind counts."""

from collections.abc import Sequence

from torch import Generator

from rlcanary.checks.check import check
from rlcanary.checks.subject import Subject
from rlcanary.contract.batch import Completion, Group

EOS_IDS = (2, 5)
TRAINED = "[row[keep.bool()].tolist() for row, keep in zip(output.completion_ids, output.completion_mask)]"


def _group(*completions: Sequence[int]) -> Group:
    """A group of these completions, with rewards 1, 2, … so that rows can be told apart."""
    return Group(
        prompt_ids=[11, 12],
        completions=[
            Completion(
                list(ids),
                logprobs=[-0.5] * len(ids),
                finish_reason="stop" if ids and ids[-1] in EOS_IDS else "length",
            )
            for ids in completions
        ],
        rewards=[float(row) for row in range(1, len(completions) + 1)],
    )


@check("eos.truncated_completion_is_whole", needs=("make_batch",))
def truncated_completion_is_whole(subject: Subject, rng: Generator) -> None:
    """A completion that was cut off by the token limit is trained on all of its tokens and on no end of sequence.

    Silent because a truncated completion that is dropped, shortened or given an end it never sampled changes the length
    and nothing else: the policy learns to stop where it was cut. Look for an EOS that is appended, for masks that search
    for one, and for a last token that happens to be the padding id.
    """
    for completions in ([[21, 22, 23]], [[21, 22], [23]], [[21, 22, 23, 24], [25], [26, 27]]):
        for pad_token_id in (0, 2, completions[-1][-1]):
            with subject.case(completions, f"padding id {pad_token_id}"):
                call = subject.call("make_batch", [_group(*completions)], pad_token_id)
                told = f"with padding id {pad_token_id}, other tokens of the truncated completions are trained"
                call.expect_equal(TRAINED, completions, told)


@check("eos.end_is_trained", needs=("make_batch",))
def end_is_trained(subject: Subject, rng: Generator) -> None:
    """The end of sequence that ended a completion is trained, whichever of the EOS ids it is and whatever the padding is.

    Silent because a policy that gets no gradient for stopping writes longer and longer. Look for `ids != pad` where the
    padding is the EOS, and for one EOS id where the sampler stops at several.
    """
    for completions in ([[21, 2]], [[21, 2], [22, 23, 5]], [[2], [21, 22, 5], [21, 22, 23, 24]]):
        for pad_token_id in (0, 2, 5):
            with subject.case(completions, f"padding id {pad_token_id}"):
                call = subject.call("make_batch", [_group(*completions)], pad_token_id)
                told = (
                    f"with padding id {pad_token_id}, the completions do not end in training as they ended in sampling"
                )
                call.expect_equal(TRAINED, completions, told)


@check("eos.end_within_a_completion", needs=("make_batch",))
def end_within_a_completion(subject: Subject, rng: Generator) -> None:
    """What was sampled behind an EOS id is trained as well: the completion is as long as the sampler says.

    Silent because an EOS in the middle is rare: a sampler that is told to ignore it, a minimum length, several turns in one
    completion. Look for a mask that is searched from ids where the lengths are known.
    """
    completions = [[21, 2, 22, 2], [21, 5, 23]]
    for pad_token_id in (0, 2):
        with subject.case(f"padding id {pad_token_id}"):
            call = subject.call("make_batch", [_group(*completions)], pad_token_id)
            call.expect_equal(TRAINED, completions, "tokens that were sampled behind an EOS id are missing")


@check("eos.masks_agree", needs=("make_batch", "completion_mask"))
def masks_agree(subject: Subject, rng: Generator) -> None:
    """The mask that is searched in the ids is the mask that the batch has from the lengths.

    Silent because each is right somewhere: the loss uses one and the metrics, the KL or the reward model the other. Only
    rows that end with an EOS or fill the batch are compared, since ids cannot tell a row that was cut short. Look for two
    definitions of the same mask.
    """
    completions = [[21, 22, 23, 2], [24, 5], [25, 26, 27, 28], [2]]
    expected = [[position < len(ids) for position in range(4)] for ids in completions]
    for pad_token_id in (0, 2, 21):
        with subject.case(f"padding id {pad_token_id}"):
            call = subject.call("make_batch", [_group(*completions)], pad_token_id)
            call.expect_equal(
                "output.completion_mask.bool().tolist()", expected, "the batch's mask is not that of the lengths"
            )
            searched = (
                f"adapter.completion_mask(output.completion_ids, {list(EOS_IDS)}, {pad_token_id}).bool().tolist()"
            )
            call.expect_equal(
                searched, expected, "the mask that is searched in the batch's ids is not that of the lengths"
            )


@check("eos.empty_completion", needs=("make_batch",))
def empty_completion(subject: Subject, rng: Generator) -> None:
    """A completion without tokens is refused, or keeps its row and its reward and has nothing to train.

    Silent because a row that disappears moves every reward behind it to another completion, and one with a made-up token
    is trained. Look at aborted requests, at `if ids`, and at guards that ask whether anything at all is trained where
    each row has to be asked.
    """
    completions = [[21, 2], [], [22, 23, 2]]
    call = subject.call_unless_raised("make_batch", [_group(*completions)], 0)
    if call is not None:
        call.expect_equal(TRAINED, completions, "with an empty completion, the rows are other ones", may_raise=True)
        rewards = "[float(reward) for reward in output.rewards]"
        call.expect_equal(rewards, [1.0, 2.0, 3.0], "with an empty completion, the rewards moved", may_raise=True)
