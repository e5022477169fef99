"""The adapter as the body of a check sees it: the same, with its calls counted and its results on the CPU."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rlcanary.checks.devices import is_elsewhere, on_cpu
from rlcanary.checks.tally import Tally
from rlcanary.contract.adapter import CAPABILITIES, Adapter, NotProvided, contract_of, newer_arguments, written
from rlcanary.contract.batch import Batch
from rlcanary.contract.conventions import Conventions


class Observed:
    """An adapter whose calls are counted in a tally, under the conventions that its findings are judged by.

    Attributes:
        conventions: the declared conventions; other ones to find out whether they explain a failure.
    """

    def __init__(self, adapter: Adapter, tally: Tally, conventions: Conventions) -> None:
        self._adapter = adapter
        self._tally = tally
        self.conventions = conventions

    def configured(self, **changes: Any) -> Observed:
        """Return the same codebase under other conventions; itself without changes.

        Raises:
            NotProvided: the codebase has no such setting.
        """
        if not changes:
            return self
        return Observed(self._adapter.configured(**changes), self._tally, self.conventions.replace(**changes))

    def __deepcopy__(self, memo: dict[int, Any]) -> Observed:
        """Copy the adapter, with all that it remembers of its calls."""
        return Observed(copy.deepcopy(self._adapter, memo), self._tally, self.conventions)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._adapter, name)
        if name not in CAPABILITIES:
            return attribute

        _, *names = contract_of(name).parameters

        @functools.wraps(attribute)
        def call(*arguments: Any, **keywords: Any) -> Any:
            _require_new_arguments(name, attribute, arguments, keywords)
            shapes = [str(list(each.shape)) if isinstance(each, Tensor) else type(each).__name__ for each in arguments]
            self._tally.calling = f"{name}({', '.join(shapes)})"
            # Findings keep it: no engine or state may outlive the check in one.
            given = dict(zip(names, arguments, strict=False)) | keywords
            self._tally.given = {key: value for key, value in given.items() if isinstance(value, Tensor | Batch | list)}
            self._tally.has_returned = False
            output = attribute(*arguments, **keywords)
            if isinstance(output, Tensor) and contract_of(name).return_annotation == "LossOutput":
                raise TypeError(f"{name} returned a tensor, where a LossOutput belongs: return LossOutput(loss)")
            self._tally.has_returned = True
            self._tally.made += 1
            self._tally.is_elsewhere |= is_elsewhere(output)
            return on_cpu(output)

        return call


def _require_new_arguments(
    name: str, capability: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> None:
    """Decline for an adapter that was written before the contract gave this capability the arguments with a default.

    Raises:
        NotProvided: it does not take them; the reason says how to write it now.
    """
    contract = contract_of(name)
    given = contract.bind(None, *arguments, **keywords).arguments
    newer = [each for each in newer_arguments(name) if each in given]
    if not newer:
        return
    try:
        inspect.signature(capability).bind(*arguments, **keywords)
    except TypeError:
        told = f"its {name} takes no {' and '.join(newer)}: write it as `def {name}({written(contract.parameters)})`"
        raise NotProvided(told) from None
