"""The records of the contract, in reading order."""

from __future__ import annotations

from typing import Any

from rlcanary.contract.batch import CollatedBatch, Completion, Group, LossOutput, PolicyBatch
from rlcanary.contract.records.buffering import BufferSettings, Taken
from rlcanary.contract.records.building import LoraSettings, PlanSettings, RunPlan, RunSettings
from rlcanary.contract.records.conversations import ConversationOptions, ConversationRow, Episode, Reply, Task
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
from rlcanary.contract.state import Item

RECORDS: tuple[type[Any], ...] = (
    *(Completion, Group, CollatedBatch, PolicyBatch, LossOutput, Item, Lengths, RewardParts),
    *(CreditBatch, Credit, ValueBatch),
    *(Task, Reply, ConversationOptions, ConversationRow, Episode),
    *(BufferSettings, Taken),
    *(RunSettings, LoraSettings, PlanSettings, RunPlan),
    *(Layout, RowShard, VocabShards, RoutedRow, ReplayLayout),
    *(SupervisedBatch, DistillationBatch, PreferenceBatch),
    *(Answer, DataRow, PreparationOptions, PreparedData, PreparedRow, Setting),
    *(RolloutBatch, Metric, EvaluatedItem, LoggedSample),
)
