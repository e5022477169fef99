"""What the audit costs inside TRL's trainer and the bundled one: the CPU time of steps, with it against without."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rlcanary import live
from rlcanary.grpo.plan.reading import read_plan
from rlcanary.grpo.train import train
from rlcanary.live import Audit
from rlcanary.tiny_models import VOCABULARY, tiny_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples/arithmetic.yaml"


class Clock(TrainerCallback):
    """Notes the CPU time of the process behind each step."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.marks.append(time.process_time())


def in_trl(every: int | None, steps: int, folder: Path, features: int, tokens: int) -> float:
    """Train with TRL -> the CPU seconds of all steps but the first."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": features,
        "intermediate_size": 2 * features,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    trainer = GRPOTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, **shape)),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        processing_class=tiny_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["t5 t6", "t7", "t8 t9"] * 4}),
        args=GRPOConfig(
            output_dir=str(folder / "run"),
            use_cpu=True,
            bf16=False,
            num_generations=8,
            per_device_train_batch_size=8,
            max_completion_length=tokens,
            max_steps=steps,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        ),
    )
    trainer.remove_callback(PrinterCallback)
    clock = Clock()
    if every is not None:
        trainer.add_callback(live.trl(trainer, every=every, on_finding="log"))
    trainer.add_callback(clock)
    trainer.train()
    return clock.marks[-1] - clock.marks[0]


def in_the_bundled_trainer(every: int | None, steps: int, folder: Path, features: int, tokens: int) -> float:
    """Train the plan of the README with a larger model -> the CPU seconds of all steps but the first."""
    changes = {
        "run.folder": folder / "run",
        "run.steps": steps,
        "run.checkpoint_every": steps,
        "run.threads": 1,
        "model.scratch.hidden_size": features,
        "model.scratch.layers": 4,
        "sampling.max_new_tokens": tokens,
        "schedule.prompts_per_step": 1,
        "schedule.group_size": 8,
        "schedule.epochs_per_step": 1,
    }
    plan = read_plan(EXAMPLE, [f"{key}={value}" for key, value in changes.items()])
    marks: list[float] = []
    audit = None if every is None else Audit(plan.conventions, every=every, on_finding="log")
    train(plan, False, lambda *_: marks.append(time.process_time()), audit)
    return marks[-1] - marks[0]


TRAINERS: dict[str, Callable[[int | None, int, Path, int, int], float]] = {
    "TRL": in_trl,
    "the bundled trainer": in_the_bundled_trainer,
}


def cost(trainer: str, every: int, repeats: int, features: int, tokens: int) -> float:
    """Return the CPU time of steps with the audit over that without, the median of alternating runs."""
    measured = max(every, 5)
    ratios = []
    for _ in range(repeats):
        seconds = []
        for asked in (every, None):
            with tempfile.TemporaryDirectory() as folder:
                seconds.append(TRAINERS[trainer](asked, measured + 1, Path(folder), features, tokens))
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)
