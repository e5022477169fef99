"""Containers that policies and environments exchange: ids, logprobs and masks of B rows.

Rows are ragged: one tensor per row without padding, so that no id has to be given up to mean "nothing here". Padding is
made on demand, on the left of prompts and on the right of responses, which puts every response at the same column.
Shapes: B rows, P prompt positions, R response positions, S = P + R.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from rlcanary.reference.masks import lengths_to_mask

Messages = Sequence[Mapping[str, Any]]
MaskStrategy = Literal["response", "assistant", "attention"]


@dataclass(frozen=True)
class _Rows:
    """One value per token.

    Attributes:
        prompt: B tensors [P_i].
        response: B tensors [R_i].
    """

    prompt: Sequence[Tensor]
    response: Sequence[Tensor]

    def __post_init__(self) -> None:
        if len(self.prompt) != len(self.response):
            raise ValueError(f"{len(self.prompt)} prompts and {len(self.response)} responses: each row has one of each")
        for row in (*self.prompt, *self.response):
            if row.ndim != 1:
                raise ValueError(f"a row of shape {tuple(row.shape)}: rows are [length], without padding")
            self._check(row)

    def _check(self, row: Tensor) -> None:
        raise NotImplementedError

    @property
    def full(self) -> list[Tensor]:
        """Join each prompt with its response: B tensors [P_i + R_i]."""
        return [torch.cat(row) for row in zip(self.prompt, self.response, strict=True)]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Count the tokens of each row's prompt and response."""
        return [(len(prompt), len(response)) for prompt, response in zip(self.prompt, self.response, strict=True)]

    def check_like(self, other: _Rows) -> None:
        """Check that the other rows have the same lengths.

        Raises:
            ValueError: they have other lengths.
        """
        if self.lengths != other.lengths:
            raise ValueError(
                f"{type(self).__name__} of (prompt, response) lengths {self.lengths} do not belong to "
                f"{type(other).__name__} of lengths {other.lengths}"
            )

    def _padded(self, value: float) -> tuple[Tensor, Tensor]:
        return _pad(self.prompt, value, on_the_left=True), _pad(self.response, value)


@dataclass(frozen=True)
class Tokens(_Rows):
    """Ids: long tensors, the end-of-sequence id part of the response if it was sampled."""

    def _check(self, row: Tensor) -> None:
        if row.dtype != torch.long:
            raise ValueError(f"ids of {row.dtype}: token ids are torch.long")

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]] | None = None) -> Self:
        """Build rows from plain lists; without responses they are empty."""
        responses = [[] for _ in prompts] if responses is None else responses
        return cls(
            [torch.tensor(list(row), dtype=torch.long) for row in prompts],
            [torch.tensor(list(row), dtype=torch.long) for row in responses],
        )

    def padded(self, pad_token_id: int) -> tuple[Tensor, Tensor]:
        """Pad to ([B, P] on the left, [B, R] on the right). `Masks` tells which positions hold a token."""
        return self._padded(pad_token_id)


@dataclass(frozen=True)
class LogProbs(_Rows):
    """Logprobs in nats, NaN on an unscored token: never 0, which would call it certain."""

    def _check(self, row: Tensor) -> None:
        if not row.is_floating_point():
            raise ValueError(f"logprobs of {row.dtype}: they are floating-point")
        if (row > 0).any():
            raise ValueError(f"a logprob of {float(row[row > 0][0])} is above 0")

    def padded(self) -> tuple[Tensor, Tensor]:
        """Pad to ([B, P] on the left, [B, R] on the right), with NaN."""
        return self._padded(torch.nan)


@dataclass(frozen=True)
class Masks(_Rows):
    """Masks of the tokens that the assistant wrote in this rollout; every token of a row can be attended to."""

    def _check(self, row: Tensor) -> None:
        if row.dtype != torch.bool:
            raise ValueError(f"a mask of {row.dtype}: masks are torch.bool")

    @classmethod
    def of(cls, tokens: Tokens) -> Self:
        """Build masks of single-turn rows: the assistant wrote the response and no other token."""
        return cls(
            [torch.zeros(row.shape, dtype=torch.bool) for row in tokens.prompt],
            [torch.ones(row.shape, dtype=torch.bool) for row in tokens.response],
        )

    def select(self, strategy: MaskStrategy | Sequence[Tensor]) -> list[Tensor]:
        """Select the tokens that count, B tensors [P_i + R_i] bool.

        Args:
            strategy: "response" is all that follows the prompt, tool results included; "assistant" all that the assistant
                wrote; "attention" every token. A list of masks stands for itself.

        Raises:
            ValueError: the strategy is unknown, or the list does not fit the rows.
        """
        if not isinstance(strategy, str):
            own = list(strategy)
            if [row.shape for row in own] != [row.shape for row in self.full]:
                raise ValueError(
                    f"masks of lengths {[len(row) for row in own]} for rows of lengths {[len(row) for row in self.full]}"
                )
            if any(row.dtype != torch.bool for row in own):
                raise ValueError(f"masks of {[row.dtype for row in own]}: masks are torch.bool")
            return own
        match strategy:
            case "assistant":
                return self.full
            case "attention":
                return [torch.ones_like(row) for row in self.full]
            case "response":
                pairs = zip(self.prompt, self.response, strict=True)
                return [torch.cat([torch.zeros_like(prompt), torch.ones_like(rest)]) for prompt, rest in pairs]
            case _:
                raise ValueError(f"mask strategy {strategy!r}: response, assistant, attention or a list of masks")

    def padded(self) -> tuple[Tensor, Tensor]:
        """Pad the assistant's tokens to ([B, P], [B, R]), false on padding."""
        prompt_BP, response_BR = self._padded(0)
        return prompt_BP.bool(), response_BR.bool()

    def attention(self) -> tuple[Tensor, Tensor]:
        """Mark the positions that hold a token as ([B, P] false on the left, [B, R] false on the right)."""
        prompts, responses = (torch.tensor([pair[side] for pair in self.lengths], dtype=torch.long) for side in (0, 1))
        widths = [int(part.max()) if len(part) else 0 for part in (prompts, responses)]
        return lengths_to_mask(prompts, widths[0]).flip(1), lengths_to_mask(responses, widths[1])


def _pad(rows: Sequence[Tensor], value: float, on_the_left: bool = False) -> Tensor:
    if not rows:
        return torch.empty(0, 0)
    side = "left" if on_the_left else "right"
    padded_BL: Tensor = torch.nn.utils.rnn.pad_sequence(
        list(rows), batch_first=True, padding_value=value, padding_side=side
    )
    return padded_BL
