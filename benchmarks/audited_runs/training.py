"""A training run over an adapter's own functions, with an audit: sample, make a batch, score, loss, step, sync."""

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.batch import CollatedBatch, PolicyBatch
from rlcanary.contract.layers import copied
from rlcanary.contract.presets import GRPO
from rlcanary.contract.state import Item
from rlcanary.grpo.lora import add_adapters, merged_weights
from rlcanary.grpo.plan.models import LoraSettings
from rlcanary.live import Audit
from rlcanary.tiny_models import tiny_llama

PAD, EOS = 0, 2
LEARNING_RATE = 1e-2
# The tokens that a completion may have, and the rows of an update: four groups of four, less an aborted request.
MAX_TOKENS, ROWS = 12, 15
# Conventions and micro-batches of the runs with a bug.
PROFILES = {
    "GRPO": (GRPO.replace(kl_coef=0.05, temperature=0.8), 1),
    "token mean": (
        GRPO.replace(aggregation="token_mean", importance_level="token", old_logprobs="trainer", entropy_coef=0.01),
        1,
    ),
    "micro-batches": (GRPO.replace(aggregation="token_mean", advantage_scale="none"), 4),
    "constant": (GRPO.replace(aggregation="constant", aggregation_constant=20.0, clip_high=0.3), 1),
}


def reward(text: str) -> float:
    """Give the share of small ids, as a grade of 0, 1/2 or 1."""
    ids = [int(token) for token in text.split()]
    return round(2 * sum(token < 32 for token in ids) / max(1, len(ids))) / 2


ITEMS = [
    Item(name, prompt, reward)
    for name, prompt in (("a", [1, 5, 6]), ("b", [1, 7, 8, 9, 10]), ("c", [1, 11]), ("d", [1, 12, 13, 14]))
]


@dataclass
class Run:
    """A training run over an adapter's own functions, of two updates per rollout.

    Attributes:
        adapter: what is trained with.
        audit: watches the updates; None for none.
        pieces: micro-batches of an update.
        lag: rollouts by which a batch is older than the weights that train on it.
        lora: train low-rank adapters.
        half: the engine holds its weights in bfloat16.
        seed: of the weights and the samples.
        size: of a larger model, for the cost.
    """

    adapter: ReferenceAdapter
    audit: Audit | None
    pieces: int = 1
    lag: int = 0
    lora: bool = False
    half: bool = False
    seed: int = 0
    size: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        model = tiny_llama(self.seed) if self.size is None else wider_llama(*self.size[:2])
        with torch.no_grad():  # as sure of its next token as a trained model is
            model.lm_head.weight *= 4
        self.reference_model = copied(model)
        self.engine = self.adapter.new_engine(model.bfloat16() if self.half else model)
        model = model.float()
        if self.lora:
            add_adapters(model, LoraSettings(rank=4, alpha=8), self.seed)
        self.state = self.adapter.new_state(model.train(), self.reference_model, LEARNING_RATE)
        self.trace: list[float] = []
        self.syncs, self.waiting = 0, deque[CollatedBatch]()
        self.sampling = {
            "n": 4,
            "temperature": self.adapter.conventions.temperature,
            "max_new_tokens": MAX_TOKENS,
            "eos_token_ids": [EOS],
        }
        if self.size is not None:
            self.sampling["max_new_tokens"] = self.size[2]

    def step(self) -> None:
        """Sample, update twice, sync."""
        adapter = self.adapter
        while len(self.waiting) <= self.lag:
            seed = 1000 * self.seed + self.syncs * (self.lag + 2) + len(self.waiting)
            groups = adapter.rollout(self.engine, ITEMS, {**self.sampling, "seed": seed})
            # A request of the second prompt was aborted.
            groups[1] = replace(groups[1], completions=groups[1].completions[:-1], rewards=groups[1].rewards[:-1])
            self.waiting.append(adapter.make_batch(groups, PAD))
        batch = self.waiting.popleft()
        advantages = adapter.advantages(batch.rewards, batch.group_ids)
        with torch.no_grad():
            references = adapter.completion_logprobs(self.reference_model, batch, adapter.conventions.temperature)
            before = adapter.completion_logprobs(self.state.model, batch, adapter.conventions.temperature)
        for update in range(2):
            self.take(batch, advantages, references, before, self.syncs if update == 0 else None)
        if self.lora:
            self.engine.load_weights(merged_weights(self.state.model).items())
            self.engine.reset_prefix_cache()
            self.engine.version += 1
        else:
            adapter.sync_weights(self.state, self.engine)
        self.syncs += 1

    def take(
        self, batch: CollatedBatch, advantages: Tensor, references: Tensor, before: Tensor, version: int | None
    ) -> None:
        """Take an update on a batch, in micro-batches where the run has several."""
        conventions, model = self.adapter.conventions, self.state.model
        known: dict[str, Any] = {
            "rewards": batch.rewards,
            "group_ids": batch.group_ids,
            "advantages": advantages,
            "old_logprobs": batch.old_logprobs if conventions.old_logprobs == "sampler" else before,
            "sampler_logprobs": batch.old_logprobs,
            "ref_logprobs": references,
            "versions": None if version is None else batch.policy_versions,
            "trainer_version": version,
        }
        watched = (
            nullcontext() if self.audit is None else self.audit.update(mask=batch.completion_mask, model=model, **known)
        )
        with watched as update:
            self.state.optimizer.zero_grad()
            logprobs = self.adapter.completion_logprobs(model, batch, conventions.temperature)
            entropy = reference.completion_scores(model, batch, conventions.temperature)[1]
            if update is not None:
                rows = torch.arange(len(batch.rewards)).tensor_split(self.pieces)
                parts = [update.watch(logprobs[each], rows=each, entropy=entropy[each]) for each in rows]
                logprobs = torch.cat(parts)
            given = PolicyBatch(
                logprobs,
                known["old_logprobs"],
                advantages,
                batch.completion_mask,
                references,
                batch.old_logprobs,
                entropy,
                batch.group_ids,
            )
            if self.pieces > 1:
                output = self.adapter.accumulated_loss(given, self.pieces)
            else:
                output = self.adapter.policy_loss(given)
            output.loss.backward()
            self.state.optimizer.step()
            self.trace.append(sum(float(each.detach().double().sum()) for each in model.parameters()))
            if update is not None:
                update.log({**output.metrics, "loss": output.loss.detach(), "reward": batch.rewards.mean()})


def wider_llama(width: int, layers: int) -> Any:
    """Make a Llama whose forward pass takes a while."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "vocab_size": 4096}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8, pad_token_id=PAD))
