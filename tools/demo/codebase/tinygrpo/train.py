"""The training loop."""

import copy

import torch

from tinygrpo import task
from tinygrpo.advantages import group_advantages
from tinygrpo.loss import completion_mask, policy_loss, token_logprobs
from tinygrpo.model import build_model
from tinygrpo.sampling import sample


def completion_logprobs(model, prompt_ids, completion_ids, temperature):
    """[B, T]: the log-probability of each completion token. Logits at t predict token t + 1."""
    logits = model(torch.cat([prompt_ids, completion_ids], dim=1)).logits
    return token_logprobs(logits[:, prompt_ids.shape[1] - 1 : -1], completion_ids, temperature)


def train(config):
    """Trains a new model and returns one dictionary of metrics for each step."""
    model = build_model(config.seed)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    generator = torch.Generator().manual_seed(config.seed)
    history = []
    for _ in range(config.steps):
        prompts = task.make_prompts(config.prompts_per_step, generator)
        prompt_ids = prompts.repeat_interleave(config.num_samples, dim=0)
        group_ids = torch.arange(config.prompts_per_step).repeat_interleave(config.num_samples)
        completion_ids = sample(model, prompt_ids, config.max_new_tokens, config.temperature)
        mask = completion_mask(completion_ids, [task.EOS])
        rewards = task.reward(prompt_ids, completion_ids, mask)
        advantages = group_advantages(rewards, group_ids)
        with torch.no_grad():
            old_logprobs = completion_logprobs(model, prompt_ids, completion_ids, config.temperature)
            ref_logprobs = completion_logprobs(reference, prompt_ids, completion_ids, config.temperature)
        for _ in range(config.epochs):
            logprobs = completion_logprobs(model, prompt_ids, completion_ids, config.temperature)
            loss, metrics = policy_loss(
                logprobs, old_logprobs, ref_logprobs, advantages, mask, clip_eps=config.clip_eps, beta=config.beta
            )
            optimizer.zero_grad()
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
        metrics["reward"] = rewards.mean().item()
        metrics["advantage_abs_mean"] = advantages.abs().mean().item()
        metrics["grad_norm"] = grad_norm.item()
        history.append(metrics)
    return history
