"""What the audit costs inside TRL's trainer and the bundled one: the CPU time of steps, with it against without."""

import logging
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
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


class AfterStep(TrainerCallback):
    """Calls a function behind each step."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self.ended = ended

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended()


def in_trl(every: int | None, steps: int, folder: Path, features: int, tokens: int, ended: Callable[[], None]) -> None:
    """Train with TRL."""
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
    if every is not None:
        trainer.add_callback(live.trl(trainer, every=every, on_finding="log"))
    trainer.add_callback(AfterStep(ended))
    trainer.train()


def in_the_bundled_trainer(
    every: int | None, steps: int, folder: Path, features: int, tokens: int, ended: Callable[[], None]
) -> None:
    """Train the plan of the README with a larger model."""
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
    audit = None if every is None else Audit(plan.conventions, every=every, on_finding="log")
    train(plan, False, lambda *_: ended(), audit)


TRAINERS = {"TRL": in_trl, "the bundled trainer": in_the_bundled_trainer}
ARMS = {"every=1": 1, "every=20": 20, "without": None, "a second run without": None}


def costs(trainer: str, steps: int, features: int, tokens: int) -> Iterator[dict[str, float]]:
    """Train four times at once, step by step in turns: with the audit of each update, of one in 20, and twice without.

    Each run has a process of its own. All do the same work, since the audit changes nothing, and the four take the same step
    one after the other, so that what other work does to the machine reaches all of them.

    Yields:
        Behind each step but the first, the CPU time of the steps so far over that without the audit. The ratio of the second
        run without tells how much of the others is chance.

    Raises:
        EOFError: One of the runs ended before its last step.
    """
    context = multiprocessing.get_context("spawn")
    runs, processes = {}, []
    for name, every in ARMS.items():
        runs[name], theirs = context.Pipe()
        arguments = (trainer, every, steps, features, tokens, theirs)
        processes.append(context.Process(target=_train_in_turns, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
    began = {name: run.recv() for name, run in runs.items()}
    ends = dict(began)
    for step in range(1, steps):
        first = step % len(runs)
        for name in [*runs, *runs][first : first + len(runs)]:
            runs[name].send("go on")
            ends[name] = runs[name].recv()
        seconds = {name: ends[name] - began[name] for name in runs}
        yield {name: each / seconds["without"] for name, each in seconds.items() if name != "without"}
    for run, process in zip(runs.values(), processes, strict=True):
        run.send("go on")
        process.join()


def _train_in_turns(
    trainer: str, every: int | None, steps: int, features: int, tokens: int, driver: Connection
) -> None:
    """Train, and behind each step say the CPU time of this process and wait for the word to go on."""

    def ended() -> None:
        driver.send(time.process_time())
        driver.recv()

    torch.set_num_threads(1)
    logging.getLogger("rlcanary.live").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        TRAINERS[trainer](every, steps, Path(folder), features, tokens, ended)
