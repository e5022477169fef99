"""Supervised fine-tuning with the trainer's parts: sft.py PLAN LOG_DIR MODEL_DIR STEPS.

The loss is the mean of -log p over the tokens of the right answers, with the reference's logprobs on the trainer's batches,
model and data; the log and the model folder are what `rlcanary dump-logs` and `rlcanary train` read.
"""

import sys
from pathlib import Path

import torch

from rlcanary.contract.batch import Completion, Group
from rlcanary.grpo.data.datasets import arithmetic
from rlcanary.grpo.plan.models import load_model, save_model
from rlcanary.grpo.plan.reading import read_plan
from rlcanary.grpo.training.run_log import RunLog
from rlcanary.reference.data.batching import make_batch
from rlcanary.reference.logprobs import completion_logprobs


def main(plan_file: str, log_dir: str, model_dir: str, steps: str) -> None:
    plan = read_plan(Path(plan_file))
    torch.manual_seed(plan.run.seed)
    model, tokenizer = load_model(plan.model, plan.run.seed)
    options = {name: value for name, value in plan.data.datasets[0].items() if name != "name"}
    groups = [
        Group(
            tokenizer(row.prompt, add_special_tokens=False).input_ids,
            [Completion([*tokenizer(row.target, add_special_tokens=False).input_ids, tokenizer.eos_token_id])],
            [1.0],
        )
        for row in arithmetic(**options)
    ]
    batch, _ = make_batch(groups, tokenizer.pad_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.optimizer.learning_rate, weight_decay=0.0)
    log = RunLog(Path(log_dir))
    for step in range(int(steps)):
        logprobs_BT = completion_logprobs(model, batch)
        loss = -logprobs_BT[batch.completion_mask].mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        answers = logprobs_BT.nan_to_num(0.0).sum(-1).exp()
        log.log(step, {"loss": loss.item(), "grad_norm": norm.item(), "answer_probability": answers.mean().item()})
    log.close()
    save_model(model, tokenizer, Path(model_dir))


main(*sys.argv[1:])
