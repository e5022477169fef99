"""The audit inside real training runs: bugs that it finds, runs that it leaves alone, and what it costs.

    python benchmarks/live.py [--updates 20] [--healthy 50] [--length 300] [--json FILE] [--quick]

Runs are those of a small loop over an adapter's own functions: sample, make a batch, score, advantages, loss, step, sync.
Every bug of the museum that such a run reaches is planted in it. A finding of the audit alone counts. Healthy
runs are of four kinds: rows one version old, low-rank adapters, an engine in bfloat16, and four micro-batches.
The cost is CPU time of the process, with the audit against without, in alternating runs, and the memory of tensors.
"""

import argparse
import gc
import json
import logging
import math
import statistics
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs import Bug, all_bugs
from rlcanary.contract.batch import CollatedBatch, PolicyBatch
from rlcanary.contract.layers import copied
from rlcanary.contract.presets import GRPO
from rlcanary.contract.state import Item
from rlcanary.grpo.lora import add_adapters, merged_weights
from rlcanary.grpo.plan.models import LoraSettings
from rlcanary.live import Audit
from rlcanary.tiny_models import tiny_llama

# What a run calls; a bug in anything else never reaches an update.
REACHED = {
    *("completion_logprobs", "token_logprobs", "advantages", "policy_loss", "accumulated_loss", "make_batch"),
    *("rollout", "sync_weights", "new_engine"),
}
PAD, EOS = 0, 2
LEARNING_RATE = 1e-2
IDLE = ("not reached", 0)
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
            "max_new_tokens": 12,
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


def planted(bug: type[Bug], updates: int) -> tuple[str, int] | None:
    """Train with a bug -> the kind of its first finding and the audited updates until then.

    None is one that takes the weights elsewhere and is not found. IDLE does not, or ends the run with an error.
    """
    is_reached = False
    for profile, (conventions, pieces) in PROFILES.items():
        audit = Audit(conventions, every=1, on_finding="log")
        run = Run(bug(conventions), audit, pieces=pieces)
        while audit.updates < updates:
            try:
                run.step()
            except (ValueError, RuntimeError, LookupError, TypeError, AttributeError):
                return IDLE  # The run ends with an error.
            if audit.findings:
                return audit.findings[0].invariant, audit.audited
        # Later, a difference in the last bit has grown.
        pairs = zip(run.trace[:6], right(profile, updates)[:6], strict=True)
        is_reached |= not all(math.isclose(got, wanted, rel_tol=1e-5) for got, wanted in pairs)
    return None if is_reached else IDLE


@cache
def right(profile: str, updates: int) -> list[float]:
    """Train without a mistake -> the sum of the weights after each update."""
    conventions, pieces = PROFILES[profile]
    run = Run(ReferenceAdapter(conventions), None, pieces=pieces)
    while len(run.trace) < updates:
        run.step()
    return run.trace


def reached(bug: type[Bug]) -> bool:
    """Tell whether a run calls what the bug changes."""
    return any(getattr(bug, name) is not getattr(ReferenceAdapter, name) for name in REACHED)


KINDS: dict[str, dict[str, Any]] = {
    "one version old": {"lag": 1},
    "low-rank adapters": {"lora": True},
    "engine in bfloat16": {"half": True},
    "four micro-batches": {"pieces": 4},
}


def healthy(kind: str, seed: int, length: int) -> list[str]:
    """Train without a mistake -> the findings, of which there should be none."""
    conventions, _ = PROFILES["micro-batches" if kind == "four micro-batches" else "GRPO"]
    audit = Audit(conventions, every=1, on_finding="log", max_staleness=KINDS[kind].get("lag", 0))
    run = Run(ReferenceAdapter(conventions), audit, seed=seed, **KINDS[kind])
    while audit.updates < length:
        run.step()
    return [str(finding) for finding in audit.findings]


def cost(every: int, steps: int, size: tuple[int, int, int]) -> float:
    """Return the CPU time of steps with the audit over that without, the median of alternating blocks."""
    conventions, _ = PROFILES["GRPO"]
    runs = {
        name: Run(ReferenceAdapter(conventions), audit, size=size)
        for name, audit in (("with", Audit(conventions, every=every, on_finding="log")), ("without", None))
    }
    ratios = []
    for _ in range(3):
        seconds = {}
        for name, run in runs.items():
            began = time.process_time()
            for _ in range(steps):
                run.step()
            seconds[name] = time.process_time() - began
        ratios.append(seconds["with"] / seconds["without"])
    return statistics.median(ratios)


def memory(size: tuple[int, int, int]) -> tuple[float, int]:
    """Compare the memory of tensors in steps with and without the audit of each update.

    Returns:
        The peak with the audit over that without, and the bytes by which it holds more between steps.
    """
    conventions, _ = PROFILES["GRPO"]
    peaks, held = [], []
    for audit in (Audit(conventions, every=1, on_finding="log"), None):
        run = Run(ReferenceAdapter(conventions), audit, size=size)
        run.step()  # makes what the optimizer keeps
        resident = tensor_bytes()
        with torch.profiler.profile(profile_memory=True) as profiled:
            run.step()
        changes = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        added = list(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))
        peaks.append(resident + max(added))
        held.append(tensor_bytes() - resident)
        del run
    return peaks[0] / peaks[1], held[0] - held[1]


def tensor_bytes() -> int:
    """Count the bytes of all tensors that there are, each storage once."""
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if isinstance(each, Tensor)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20, help="updates of a run with a bug (default: 20)")
    parser.add_argument("--healthy", type=int, default=50, help="healthy runs of each kind (default: 50)")
    parser.add_argument("--length", type=int, default=300, help="updates of a healthy run (default: 300)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--only", metavar="TEXT", help="only bugs whose id has this text, and nothing else")
    parser.add_argument("--quick", action="store_true", help="ten bugs, one healthy run of each kind of 20 updates")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bugs = [bug for bug in all_bugs() if reached(bug)]
    count, length = arguments.healthy, arguments.length
    logging.getLogger("rlcanary.live").setLevel(logging.ERROR)
    if arguments.only:
        for bug in bugs:
            if arguments.only in bug.id:
                print(bug.id, planted(bug, arguments.updates))
        return
    if arguments.quick:
        bugs, count, length = bugs[::7][:10], 1, 20
    console, quiet = Console(width=120), Console(stderr=True)

    found = {
        bug.id: planted(bug, arguments.updates) for bug in track(bugs, "planting bugs", console=quiet, transient=True)
    }
    idle = sorted(name for name, each in found.items() if each == IDLE)
    found = {name: each for name, each in found.items() if name not in idle}
    caught = {name: each for name, each in found.items() if each is not None}
    console.print(f"{len(caught)} of {len(found)} bugs that a run reaches are found", highlight=False)
    if caught:
        console.print(
            f"median {statistics.median(after for _, after in caught.values()):g} audited updates", highlight=False
        )
    table = Table("first finding", "bugs")
    for kind in sorted({kind for kind, _ in caught.values()}):
        table.add_row(kind, str(sum(each == kind for each, _ in caught.values())))
    console.print(table)
    for name in sorted(set(found) - set(caught)):
        console.print(f"  not found: {name}", highlight=False)
    console.print(
        f"  {len(idle)} others end these runs, or take their weights nowhere else: {', '.join(idle)}", highlight=False
    )

    alarms = {
        kind: [seed for seed in track(range(count), kind, console=quiet, transient=True) if healthy(kind, seed, length)]
        for kind in KINDS
    }
    for kind, seeds in alarms.items():
        console.print(
            f"{kind}: {len(seeds)} of {count} healthy runs of {length} updates have a finding {seeds or ''}",
            highlight=False,
        )

    size = (64, 2, 16) if arguments.quick else (256, 4, 48)
    costs = {every: cost(every, steps, size) for every, steps in ((1, 3), (20, 10))}
    for every, ratio in costs.items():
        console.print(f"every={every}: {ratio:.3f} times the CPU time of a step without the audit", highlight=False)
    peak, held = memory(size)
    console.print(
        f"every=1: {peak:.3f} times the peak memory of a step without the audit, and {held} bytes more between steps",
        highlight=False,
    )
    if arguments.json:
        document = {"found": found, "alarms": alarms, "cost": costs, "memory": {"peak": peak, "held": held}}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
