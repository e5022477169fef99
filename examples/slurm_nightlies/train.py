"""A run that a nightly trains: a softmax policy on three arms, with checkpoints and a log. Only the standard library."""

import argparse
import json
import math
import random
from pathlib import Path

MEANS = (0.2, 0.5, 0.9)
GROUP = 8


def advantages(rewards):
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of this job")
    parser.add_argument("--learning-rate", type=float, default=0.5)
    options = parser.parse_args()
    for folder in (options.checkpoints, options.logs):
        folder.mkdir(parents=True, exist_ok=True)
    newest = options.checkpoints / "newest.json"
    step, logits = json.loads(newest.read_text()) if newest.is_file() else (0, [0.0, 0.0, 0.0])
    with (options.logs / "metrics.jsonl").open("a") as log:
        for step in range(step + 1, step + options.steps + 1):  # noqa: B020 - from the checkpoint on
            draw = random.Random(step)
            weights = [math.exp(logit) for logit in logits]
            arms = draw.choices(range(3), weights, k=GROUP)
            rewards = [float(draw.random() < MEANS[arm]) for arm in arms]
            for arm, advantage in zip(arms, advantages(rewards), strict=True):
                for other in range(3):
                    slope = (other == arm) - weights[other] / sum(weights)
                    logits[other] += options.learning_rate * advantage * slope / GROUP
            log.write(json.dumps({"step": step, "reward": sum(rewards) / GROUP}) + "\n")
    newest.write_text(json.dumps([step, logits]))


if __name__ == "__main__":
    main()
