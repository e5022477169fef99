"""The records of losses other than the policy's: supervised labels, a teacher's distribution, and preferences.

Shapes: B rows (pairs in a preference), S sequence positions, T and U completion positions, V vocabulary entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcanary.contract.batch import Batch
from rlcanary.contract.records.credit import ValueBatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class SupervisedBatch(Batch):
    """The inputs of a supervised loss (SFT).

    Attributes:
        logits: [B, S, V] of the model for its input `token_ids`, so that those at a position predict the next token; the
            loss is differentiable with respect to them.
        token_ids: [B, S] ids of prompt, answer and padding. On tokens that are not trained they are any number.
        mask: [B, S] bool, true on the tokens that are trained. Nothing predicts the first token of a row: it is neither
            trained nor counted, whatever its mask says.
        global_tokens: number of trained tokens of the whole update that this batch is a part of; None means this batch
            is the whole.
        global_sequences: number of rows of the whole update, counted as the aggregation counts them; None likewise.
    """

    logits: Tensor
    token_ids: Tensor
    mask: Tensor
    global_tokens: float | None = None
    global_sequences: float | None = None

    @property
    def labels(self) -> Tensor:
        """[B, S] the ids of trained tokens at their own position, -100 elsewhere, for code that shifts labels itself."""
        return self.token_ids.masked_fill(~self.mask, -100)


@dataclass
class DistillationBatch(Batch):
    """The inputs of a loss between the distributions of a student and a teacher at each position.

    Attributes:
        logits: [B, T, V] of the student, which predict the token at their own position; the loss is differentiable with
            respect to them.
        teacher_logits: [B, T, V] of the teacher for the same tokens, computed without a gradient; -inf or NaN where
            `distillation_whole_rows` says that it scores trained tokens alone.
        token_ids: [B, T] ids of the completion, for a term of hard labels.
        mask: [B, T] bool, true on the tokens that are trained.
        temperature: divides the logits of both, for the divergence.
        global_tokens: number of trained tokens of the whole update that this batch is a part of; None means this batch
            is the whole.
        global_sequences: number of rows of the whole update, counted as the aggregation counts them; None likewise.
    """

    logits: Tensor
    teacher_logits: Tensor
    token_ids: Tensor
    mask: Tensor
    temperature: float = 1.0
    global_tokens: float | None = None
    global_sequences: float | None = None


@dataclass
class PreferenceBatch(Batch):
    """The inputs of a loss on pairs of a chosen and a rejected completion of the same prompt.

    Attributes:
        chosen_logprobs: [B, T] of the policy in training, for the tokens of the chosen completions; the loss is
            differentiable with respect to them.
        rejected_logprobs: [B, U] likewise for the rejected completions, which may be padded to another width.
        chosen_mask: [B, T] bool, true on the tokens that count, false on the prompt and on padding.
        rejected_mask: [B, U] bool.
        ref_chosen_logprobs: [B, T] of the reference model; None if there is none.
        ref_rejected_logprobs: [B, U] likewise.
        global_pairs: number of pairs of the whole update that this batch is a part of; None means this batch is the
            whole.
        global_tokens: number of trained tokens of the whole update's chosen completions, for an added supervised term;
            None likewise.
    """

    chosen_logprobs: Tensor
    rejected_logprobs: Tensor
    chosen_mask: Tensor
    rejected_mask: Tensor
    ref_chosen_logprobs: Tensor | None = None
    ref_rejected_logprobs: Tensor | None = None
    global_pairs: float | None = None
    global_tokens: float | None = None


OtherBatch = SupervisedBatch | DistillationBatch | PreferenceBatch | ValueBatch
"""The inputs of any loss beside the policy's: which one it is tells which loss."""
