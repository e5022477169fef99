"""The inputs of a run: verifiers, prepared datasets and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.records.preparation import Answer, DataRow, PreparationOptions, PreparedData, Setting


class Preparation:
    """Verifiers, the preparation of datasets, and the settings that a run really uses."""

    def verify(self, answer: Answer) -> bool:
        """Tell whether the team's verifier for this kind and format takes the completion for right.

        A verifier with rewards of its own says whether the reward is that of a right answer. A kind or format that no
        verifier knows raises `NotProvided`.
        """
        raise NotProvided

    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        """Prepare the rows of a dataset: render prompts, filter, take, shuffle and split.

        The tokenizer has a chat template, with which a prompt is rendered up to where the assistant's turn begins. Code
        without one of the options declines it with `NotProvided` where it is not the default.
        """
        raise NotProvided

    def list_settings(self) -> list[Setting]:
        """List settings that may be written in a run's configuration, with values that may be written.

        A nested one has a name of the adapter's choice, such as `optimizer.learning_rate`, which `effective` resolves.
        """
        raise NotProvided

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """Parse a configuration with these settings written and all others left out -> what the run uses, by name.

        The result has every name of `list_settings`. Values come from where the run reads them: the trainer's and the
        engine's own objects rather than the parsed file. A configuration that is refused raises.
        """
        raise NotProvided
