"""Trains tinygrpo for some steps with the audit in it: python audited.py FOLDER.

One line at the place where the run computes its advantages would do; the codebase is left as it is, so the line is put
around its function here.
"""

import sys
from pathlib import Path

import tinygrpo.train as training
import torch
from canary import TinyGRPO
from tinygrpo.config import GRPOConfig

from rlcanary.live import Audit

compute = training.group_advantages
audit = Audit(TinyGRPO.conventions, every=1, on_finding="log", bundles=Path(sys.argv[1]))


def group_advantages(rewards, group_ids, *settings):
    advantages = compute(rewards, group_ids, *settings)
    audit.rollout(
        rewards=rewards, group_ids=group_ids, advantages=advantages, mask=torch.ones(len(rewards), 1, dtype=torch.bool)
    )
    return advantages


training.group_advantages = group_advantages
for step, metrics in enumerate(training.train(GRPOConfig(steps=3))):
    print(f"step {step}  reward {metrics['reward']:.3f}  loss {metrics['loss']:.4f}")
for finding in audit.findings:
    print(finding)
