"""Sampling completions from the policy."""

import torch


@torch.no_grad()
def sample(model, prompt_ids, max_new_tokens, temperature):
    """[B, max_new_tokens]: one completion of each prompt."""
    ids = prompt_ids
    for _ in range(max_new_tokens):
        logits = model(ids).logits[:, -1] / temperature
        ids = torch.cat([ids, torch.multinomial(logits.softmax(dim=-1), 1)], dim=1)
    return ids[:, prompt_ids.shape[1] :]
