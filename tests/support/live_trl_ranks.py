"""A script of several ranks: three updates of TRL's trainer under DDP, with the audit. Each writes its findings as JSON."""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rlcanary import live
from rlcanary.tiny_models import tiny_tokenizer


def main(loss_type: str, model: Path, folder: Path) -> None:
    torch.manual_seed(0)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        processing_class=tiny_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["t5 t6", "t7", "t8 t9"] * 4}),
        args=GRPOConfig(
            output_dir=str(folder / "run"),
            use_cpu=True,
            bf16=False,
            report_to=[],
            num_generations=4,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_completion_length=24,
            max_steps=3,
            learning_rate=1e-3,
            disable_tqdm=True,
            loss_type=loss_type,
        ),
    )
    callback = live.trl(trainer, every=1, on_finding="log")
    trainer.add_callback(callback)
    trainer.train()
    audit, rank = callback.audit, trainer.accelerator.process_index
    told = {
        "found": [str(finding) for finding in audit.findings],
        "audited": audit.audited,
        "ranks": trainer.accelerator.num_processes,
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
