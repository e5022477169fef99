"""rlcanary catches RL-on-LLM training that runs without an error and learns the wrong thing.

The names of the adapter contract and of the checks can be imported from here; torch is imported when one is first used.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from rlcanary.system.old_names import OldNames

if TYPE_CHECKING:
    from rlcanary.adapters.load import load_adapter
    from rlcanary.checks.check import Check, Result, run_check
    from rlcanary.checks.registry import all_checks
    from rlcanary.contract.adapter import Adapter, NotProvided, TrainState
    from rlcanary.contract.batch import CollatedBatch, Completion, Group, LossOutput, PolicyBatch
    from rlcanary.contract.conventions import Conventions
    from rlcanary.contract.engine import Engine, InProcessEngine
    from rlcanary.contract.presets import PRESETS
    from rlcanary.contract.records.buffering import BufferSettings, Taken
    from rlcanary.contract.records.building import LoraSettings, PlanSettings, RunPlan, RunSettings
    from rlcanary.contract.records.conversations import (
        ConversationOptions,
        ConversationRow,
        Environment,
        Episode,
        Reply,
        Session,
        Task,
    )
    from rlcanary.contract.records.credit import Credit, CreditBatch, ValueBatch
    from rlcanary.contract.records.layouts import Layout, RowShard, VocabShards
    from rlcanary.contract.records.lengths import Lengths
    from rlcanary.contract.records.other_losses import DistillationBatch, PreferenceBatch, SupervisedBatch
    from rlcanary.contract.records.preparation import (
        Answer,
        DataRow,
        PreparationOptions,
        PreparedData,
        PreparedRow,
        Setting,
    )
    from rlcanary.contract.records.reporting import EvaluatedItem, LoggedSample, Metric, RolloutBatch
    from rlcanary.contract.records.reward_parts import RewardParts
    from rlcanary.contract.records.routing import ReplayLayout, RoutedRow
    from rlcanary.contract.stand_ins import EngineModel, LogprobModel
    from rlcanary.contract.state import Item
    from rlcanary.errors import UserError

    __version__: str

HOMES = {
    "rlcanary.adapters.load": ("load_adapter",),
    "rlcanary.checks.check": ("Check", "Result", "run_check"),
    "rlcanary.checks.registry": ("all_checks",),
    "rlcanary.contract.adapter": ("Adapter", "NotProvided", "TrainState"),
    "rlcanary.contract.batch": ("CollatedBatch", "Completion", "Group", "LossOutput", "PolicyBatch"),
    "rlcanary.contract.records.buffering": ("BufferSettings", "Taken"),
    "rlcanary.contract.records.building": ("LoraSettings", "PlanSettings", "RunPlan", "RunSettings"),
    "rlcanary.contract.conventions": ("Conventions",),
    "rlcanary.contract.records.conversations": (
        "ConversationOptions",
        "ConversationRow",
        "Environment",
        "Episode",
        "Reply",
        "Session",
        "Task",
    ),
    "rlcanary.contract.records.credit": ("Credit", "CreditBatch", "ValueBatch"),
    "rlcanary.contract.engine": ("Engine", "InProcessEngine"),
    "rlcanary.contract.records.reporting": ("EvaluatedItem", "LoggedSample", "Metric", "RolloutBatch"),
    "rlcanary.contract.records.layouts": ("Layout", "RowShard", "VocabShards"),
    "rlcanary.contract.records.lengths": ("Lengths",),
    "rlcanary.contract.records.reward_parts": ("RewardParts",),
    "rlcanary.contract.records.routing": ("ReplayLayout", "RoutedRow"),
    "rlcanary.contract.stand_ins": ("EngineModel", "LogprobModel"),
    "rlcanary.contract.state": ("Item",),
    "rlcanary.contract.records.other_losses": ("DistillationBatch", "PreferenceBatch", "SupervisedBatch"),
    "rlcanary.contract.records.preparation": (
        "Answer",
        "DataRow",
        "PreparationOptions",
        "PreparedData",
        "PreparedRow",
        "Setting",
    ),
    "rlcanary.contract.presets": ("PRESETS",),
    "rlcanary.errors": ("UserError",),
}
"""The public names' home modules."""

__all__ = [
    "PRESETS",
    "Adapter",
    "Answer",
    "BufferSettings",
    "Check",
    "CollatedBatch",
    "Completion",
    "Conventions",
    "ConversationOptions",
    "ConversationRow",
    "Credit",
    "CreditBatch",
    "DataRow",
    "DistillationBatch",
    "Engine",
    "EngineModel",
    "Environment",
    "Episode",
    "EvaluatedItem",
    "Group",
    "InProcessEngine",
    "Item",
    "Layout",
    "Lengths",
    "LoggedSample",
    "LogprobModel",
    "LoraSettings",
    "LossOutput",
    "Metric",
    "NotProvided",
    "PlanSettings",
    "PolicyBatch",
    "PreferenceBatch",
    "PreparationOptions",
    "PreparedData",
    "PreparedRow",
    "ReplayLayout",
    "Reply",
    "Result",
    "RewardParts",
    "RolloutBatch",
    "RoutedRow",
    "RowShard",
    "RunPlan",
    "RunSettings",
    "Session",
    "Setting",
    "SupervisedBatch",
    "Taken",
    "Task",
    "TrainState",
    "UserError",
    "ValueBatch",
    "VocabShards",
    "all_checks",
    "load_adapter",
    "run_check",
]

sys.meta_path.append(OldNames())


def __getattr__(name: str) -> Any:
    if name == "__version__":  # to find it takes longer than everything else here
        return importlib.import_module("importlib.metadata").version("rlcanary")
    for module, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
