"""Draw tokens for `TransformersPolicy` inside transformers' `generate`, from a generator of the request's own.

`generate` with sampling would draw from torch's global random state, which the trainer uses at the same time, would count
left padding among the tokens that a repetition penalty applies to, and would take for an end a stop sequence that began in
the prompt. Here it only runs the model: the logits leave one token for it to take.
Shapes: B rows (prompts × completions), P prompt positions, S positions so far, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlcanary.contract.batch import Completion
from rlcanary.contract.sampling import Sampling
from rlcanary.reference.logprobs import token_logprobs

# Tokens that a character of a stop sequence can take, in byte-level vocabularies.
TOKENS_PER_CHARACTER = 4


class Draw:
    """The logits processor that draws the next token of each row and leaves no other. Greedy requests draw the likeliest."""

    def __init__(self, attended_BP: Tensor, parameters: Sampling, generators: Sequence[torch.Generator]) -> None:
        """Start rows without drawn tokens.

        Args:
            attended_BP: [B, P] bool, false on the padding on the left.
            parameters: parameters of all rows.
            generators: one per prompt, for its `n` rows.
        """
        self.parameters = parameters
        self.logprobs: list[Tensor] = []
        self._generators = generators
        self._padding_BP = ~attended_BP
        self._penalty, self._filters = _processors(parameters)

    def __call__(self, ids_BS: Tensor, logits_BV: Tensor) -> Tensor:
        """Draw from [B, V] logits -> 0 at the drawn token, -inf elsewhere."""
        logits_BV = logits_BV.float()
        # Padding has not been seen: the prompt's last token stands in its place.
        width = self._padding_BP.shape[1]
        seen_BS = ids_BS.clone()
        seen_BS[:, :width] = torch.where(self._padding_BP, ids_BS[:, width - 1 : width], ids_BS[:, :width])
        penalised_BV = self._penalty(seen_BS, logits_BV.clone())
        if self.parameters.do_sample:
            reported_BV = self._filters(ids_BS, penalised_BV)
            next_B = self._drawn(reported_BV.softmax(dim=-1).cpu()).to(ids_BS.device)
        else:
            reported_BV = logits_BV
            next_B = penalised_BV.argmax(dim=-1)
        if self.parameters.logprobs is not None:
            scored_BV = logits_BV if self.parameters.logprobs == "raw" else reported_BV
            self.logprobs.append(token_logprobs(scored_BV, next_B).cpu())
        return torch.full_like(logits_BV, -torch.inf).scatter(1, next_B.unsqueeze(1), 0.0)

    def _drawn(self, probabilities_BV: Tensor) -> Tensor:
        per_prompt = probabilities_BV.split(self.parameters.n)
        return torch.cat(
            [
                torch.multinomial(part_NV, 1, generator=generator).squeeze(1)
                for part_NV, generator in zip(per_prompt, self._generators, strict=True)
            ]
        )


class Ends:
    """The stopping criterion that knows where each row's completion ends: `generate` runs on for the others.

    Attributes:
        lengths: tokens of each row that have ended, None for the others.
    """

    def __init__(self, n_rows: int, prompt_width: int, parameters: Sampling, tokenizer: Any) -> None:
        self.lengths: list[int | None] = [None] * n_rows
        self._prompt_width = prompt_width
        self._parameters = parameters
        self._tokenizer = tokenizer
        self._window = TOKENS_PER_CHARACTER * max((len(stop) + 1 for stop in parameters.stop_sequences), default=0)

    def __call__(self, ids_BS: Tensor, scores: Any, **options: Any) -> Tensor:
        """Return [B] bool, true on rows that have ended."""
        for row, new in enumerate(ids_BS[:, self._prompt_width :].tolist()):
            if self.lengths[row] is None and self._ends(new):
                self.lengths[row] = len(new)
        return torch.tensor([length is not None for length in self.lengths], device=ids_BS.device)

    def completions(self, new_BT: Tensor, draw: Draw, version: int) -> list[Completion]:
        """Return the completion of each row, cut at its end."""
        logprobs_BT = torch.stack(draw.logprobs, dim=1).tolist() if draw.logprobs else None
        completions = []
        for row, new in enumerate(new_BT.tolist()):
            length = self.lengths[row] or len(new)
            completions.append(
                Completion(
                    token_ids=new[:length],
                    logprobs=None if logprobs_BT is None else logprobs_BT[row][:length],
                    finish_reason="length" if self.lengths[row] is None else "stop",
                    token_versions=[version] * length,
                    text=self._tokenizer.decode(new[:length], skip_special_tokens=self._parameters.skip_special_tokens),
                )
            )
        return completions

    def _ends(self, new: list[int]) -> bool:
        if new[-1] in (self._parameters.eos_token_ids or ()):
            return True
        if not self._parameters.stop_sequences:
            return False
        text = self._tokenizer.decode(new[-self._window :])
        return any(stop in text for stop in self._parameters.stop_sequences)


def _processors(parameters: Sampling) -> tuple[Any, Any]:
    """Build the processors: the repetition penalty, then temperature, top_k and top_p, in the order of all backends."""
    from transformers import LogitsProcessorList
    from transformers.generation.logits_process import (
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    penalty, filters = LogitsProcessorList(), LogitsProcessorList()
    if parameters.repetition_penalty != 1:
        penalty.append(RepetitionPenaltyLogitsProcessor(float(parameters.repetition_penalty)))
    if parameters.do_sample and parameters.temperature != 1:
        filters.append(TemperatureLogitsWarper(float(parameters.temperature)))
    if parameters.top_k:
        filters.append(TopKLogitsWarper(parameters.top_k))
    if parameters.top_p < 1:
        filters.append(TopPLogitsWarper(float(parameters.top_p)))
    return penalty, filters
