"""The adapter base class, through which the checks call a codebase's own functions."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Collection, Mapping
from typing import Any, Self

from rlcanary.contract.capabilities.buffering import Buffering
from rlcanary.contract.capabilities.building import Building
from rlcanary.contract.capabilities.conversations import Conversations
from rlcanary.contract.capabilities.core import Core
from rlcanary.contract.capabilities.critic import Critic
from rlcanary.contract.capabilities.data import Data
from rlcanary.contract.capabilities.inference import Inference
from rlcanary.contract.capabilities.layouts import Layouts
from rlcanary.contract.capabilities.objective import Objective
from rlcanary.contract.capabilities.other_losses import OtherLosses
from rlcanary.contract.capabilities.preparation import Preparation
from rlcanary.contract.capabilities.reporting import Reporting
from rlcanary.contract.capabilities.training import Training
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.declining import NotProvided
from rlcanary.contract.state import Item, TrainState

__all__ = ["CAPABILITIES", "GROUPS", "Adapter", "Item", "NotProvided", "TrainState", "provided"]

GROUPS = (
    *(Core, Objective, Critic, Data, Preparation, Inference, Conversations, Buffering, Building, Training),
    *(Layouts, OtherLosses, Reporting),
)
"""The groups of capabilities, those to start with first."""


class Adapter(
    Core,
    Objective,
    Critic,
    Data,
    Preparation,
    Inference,
    Conversations,
    Buffering,
    Building,
    Training,
    Layouts,
    OtherLosses,
    Reporting,
):
    """Base class of adapters. Override the capabilities that your codebase has; one is enough to start.

    Attributes:
        name: the codebase's name in reports.
        conventions: the choices that the codebase declares. The checks test it against these.
        settable: the fields of `conventions` that are settings of the codebase. The capabilities read their values from
            `self.conventions`, and raise `NotProvided` for one that the codebase does not take.

    Shapes: B rows (completions), T completion positions, V vocabulary entries. A capability that cannot take some input
        (groups of unequal size, say) raises `NotProvided` with the reason; the check then reports that instead of
        failing.
    """

    name: str = "unnamed"
    conventions: Conventions = Conventions()
    settable: Collection[str] = ()

    def configured(self, **changes: Any) -> Self:
        """Return an adapter of the same codebase with other conventions, such as `kl_coef=0.5`.

        By default a copy with these conventions, if all of them are `settable`. Override it where a setting is read when
        the adapter is made.

        Raises:
            NotProvided: the codebase has no such setting.
        """
        if not changes.keys() <= set(self.settable):
            raise NotProvided("other settings need `settable`")
        other = copy.copy(self)
        other.conventions = self.conventions.replace(**changes)
        return other

    def configurations(self) -> Mapping[str, Adapter]:
        """Return the configurations that the codebase is run in, by name, for `rlcanary check --matrix`: none by default.

        Each is an adapter, such as `self`, `self.configured(kl_coef=0.1)`, or an instance with other settings.
        """
        return {}

    def new_model(self, seed: int) -> Any:
        """Create a tiny model of your own architecture, random from this seed, on which every check with a model runs too.

        It is called with input_ids, attention_mask and position_ids, returns an object with `logits` [B, S, V], and has a
        vocabulary of at least 64 ids.
        """
        raise NotProvided

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        """Create a state to train this model from: by default AdamW without weight decay and a constant learning rate.

        Override it where your trainer wraps the model, builds its optimizer or has a schedule of its own. The checks give
        models in half precision to your own only: without float32 masters small updates are lost.
        """
        import torch

        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
        return TrainState(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0), ref_model)

    def new_engine(self, model: Any) -> Any:
        """Create an engine with a copy of this model's weights, by default `rlcanary.contract.engine.InProcessEngine`."""
        from rlcanary.contract.engine import InProcessEngine

        return InProcessEngine(model)


CAPABILITIES = tuple(name for group in GROUPS for name in vars(group) if not name.startswith("_"))


def provided(adapter: Adapter) -> frozenset[str]:
    """Names of the capabilities that this adapter overrides, in its class or on the instance."""
    own = {name: inspect.unwrap(getattr(adapter, name)) for name in CAPABILITIES}
    return frozenset(name for name in own if getattr(own[name], "__func__", None) is not getattr(Adapter, name))


@functools.cache  # it is asked at every call of a check
def contract_of(name: str) -> inspect.Signature:
    """Return the signature of a capability in the contract, `self` included."""
    return inspect.signature(getattr(Adapter, name))


def newer_arguments(name: str) -> list[str]:
    """List the arguments with a default, which adapters that were written before them do not take."""
    return [each.name for each in contract_of(name).parameters.values() if each.default is not each.empty]


def written(parameters: Mapping[str, inspect.Parameter]) -> str:
    """Write the parameters of a capability as its definition has them, without their types."""
    return ", ".join(
        each.name if each.default is each.empty else f"{each.name}={each.default}" for each in parameters.values()
    )
