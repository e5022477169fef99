"""The records of verifiers, of the preparation of datasets, and of settings."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

AnswerKind = Literal["number", "math", "choice", "exact"]
AnswerFormat = Literal["boxed", "tag", "hash", "line", "bare"]


@dataclass(frozen=True)
class Answer:
    r"""A completion that a verifier judges.

    Attributes:
        kind: the right answer's kind: a number in decimal notation, an expression in LaTeX ("math"), the letter of a
            multiple choice, or a text that has to be the same ("exact").
        format: the way in which completions give their final answer: in `\boxed{}`, in an `<answer>` tag, behind `####`
            ("hash"), behind `Answer:` on a line of its own, or as their whole text ("bare").
        text: the completion's text.
        reference: the right answer.
    """

    kind: AnswerKind
    format: AnswerFormat
    text: str
    reference: str


@dataclass(frozen=True)
class DataRow:
    """A row of a dataset, before preparation.

    Attributes:
        id: identifies the row among all that are given.
        messages: the conversation that a completion continues, each message with its role and content.
        reference: the right answer.
        dataset: the name of the dataset that it comes from.
    """

    id: Hashable
    messages: Sequence[Mapping[str, Any]]
    reference: str
    dataset: str = ""


@dataclass(frozen=True)
class PreparationOptions:
    """The options of the preparation. The default leaves every row and its place as they are.

    Attributes:
        max_prompt_tokens: a prompt of more tokens, those of the template included, is treated as
            `Conventions.long_prompt` says; None is no limit.
        system_prompt: stands before conversations that have none of their own; "" is none.
        seed: shuffles the rows; None leaves their order. 0 is a seed.
        counts: the number of rows to take of a dataset, by name, out of those that are not dropped for another reason;
            all of a dataset that is not named.
        held_out: number of rows that are kept out of training, for evaluation.
    """

    max_prompt_tokens: int | None = None
    system_prompt: str = ""
    seed: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    held_out: int = 0


@dataclass(frozen=True)
class PreparedRow:
    """A row that a sampler can be given.

    Attributes:
        id: the row's own.
        prompt_ids: the ids for the sampler, without padding.
        reference: the row's own.
        dataset: the row's own.
    """

    id: Hashable
    prompt_ids: Sequence[int]
    reference: str
    dataset: str = ""


@dataclass(frozen=True)
class PreparedData:
    """The result of a preparation.

    Attributes:
        kept: the rows to train on, in order.
        held_out: the rows for evaluation.
        dropped: the reason for each row that is in neither, by id; None where the code does not tell.
    """

    kept: Sequence[PreparedRow]
    held_out: Sequence[PreparedRow] = ()
    dropped: Mapping[Hashable, str] | None = None


@dataclass(frozen=True)
class Setting:
    """A setting of a run that may be written in its configuration.

    Attributes:
        name: its name, as `effective` takes and returns it.
        values: values that may be written: ordinary ones first, and 0, 0.0, False, None, "" or [] last where they are
            allowed. The first values of all settings can be written together, and so can the last ones.
        derived_from: names of the settings from which its default is computed; none if it does not depend on others.
    """

    name: str
    values: Sequence[Any]
    derived_from: Sequence[str] = ()
