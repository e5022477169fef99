"""Logprobs: `rlcanary.reference.completion_scores`, which the trainer scores with."""

from types import SimpleNamespace

import torch

from rlcanary.contract.batch import Completion, Group
from rlcanary.reference import completion_scores, entropy, make_batch, token_logprobs


def compute_logprobs(logits, input_ids, temperature=1.0, align=True, prompt_lens=None):
    """Return the logprob of each id and the entropy that it was drawn with, both [B, T].

    With `align` the ids are completions, which start behind their prompts, or end the row where no lengths are given.
    """
    if not align:
        return token_logprobs(logits, input_ids, temperature), entropy(logits, temperature)
    length = logits.shape[1]
    if prompt_lens is None:
        prompt_lens = torch.full(input_ids.shape[:1], length - input_ids.shape[1])
    rows = zip(prompt_lens.tolist(), input_ids.tolist(), strict=True)
    groups = [Group([0] * start, [Completion(ids)], [0.0]) for start, ids in rows]
    batch, _ = make_batch(groups, pad_token_id=0, seq_len_buckets=[length])
    return completion_scores(lambda **_: SimpleNamespace(logits=logits), batch, temperature)
