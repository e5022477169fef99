"""Everything that a training run can be told."""

from dataclasses import dataclass


@dataclass
class GRPOConfig:
    steps: int = 20
    prompts_per_step: int = 8
    num_samples: int = 8  # completions of each prompt
    max_new_tokens: int = 8
    temperature: float = 1.0
    learning_rate: float = 3e-3
    epochs: int = 2  # optimizer steps on each batch of completions
    clip_eps: float = 0.2
    beta: float = 0.02  # weight of the KL to the reference model
    max_grad_norm: float = 1.0
    seed: int = 0
