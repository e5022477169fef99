"""TRL's trainer on a tiny model, and a script of several ranks that trains it with the audit and writes findings as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rlcanary import live
from rlcanary.tiny_models import tiny_tokenizer


def rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def trainer_of(model: Any, folder: Path, peft_config: Any = None, **settings: Any) -> Any:
    """A trainer of three updates, by default, on completions of different lengths."""
    return GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        processing_class=tiny_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["t5 t6", "t7", "t8 t9"] * 4}),
        args=GRPOConfig(
            output_dir=str(folder / "run"),
            use_cpu=True,
            bf16=False,
            num_generations=4,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_completion_length=24,
            logging_steps=1,
            disable_tqdm=True,
            **{"max_steps": 3, "learning_rate": 1e-3, "report_to": [], **settings},
        ),
        peft_config=peft_config,
    )


def main(model: Path, folder: Path) -> None:
    """Train with the mean over all tokens, which is right over ranks and micro-batches, and with a mean of their means."""
    found, audited = {}, {}
    for loss_type in ("dapo", "bnpo"):
        torch.manual_seed(0)
        trainer = trainer_of(AutoModelForCausalLM.from_pretrained(model), folder, loss_type=loss_type)
        callback = live.trl(trainer, every=1, on_finding="log")
        trainer.add_callback(callback)
        trainer.train()
        found[loss_type] = [str(finding) for finding in callback.audit.findings]
        audited[loss_type] = callback.audit.audited
    processes = trainer.accelerator
    told = {"found": found, "audited": audited, "ranks": processes.num_processes}
    (folder / f"rank-{processes.process_index}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
