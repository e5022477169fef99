"""A training loop in one file, with the audit in it: python train.py [--steps 12] [--folder run]."""

import argparse
import warnings
from pathlib import Path

import torch
from canary import Canary
from loss import policy_loss

from rlcanary.live import Audit
from rlcanary.tiny_models import tiny_llama

PAD, EOS, GROUP = 0, 2, 4


def sample(model, prompts):
    """Sample a group for each prompt -> ids [B, S] and which of the last T are of the completion, [B, T]."""
    rows = torch.tensor(prompts).repeat_interleave(GROUP, dim=0)
    ids = model.generate(
        rows,
        do_sample=True,
        top_k=0,
        max_new_tokens=12,
        pad_token_id=PAD,
        eos_token_id=EOS,
        attention_mask=torch.ones_like(rows),
    )
    completions = ids[:, rows.shape[1] :]
    ended = (completions == EOS).cumsum(dim=1) - (completions == EOS).long()
    return ids, ended == 0


def score(model, ids, width):
    """Return the logprobs and the entropies of the last `width` tokens, [B, T] each."""
    logprobs = model(ids).logits[:, -width - 1 : -1].float().log_softmax(dim=-1)
    chosen = logprobs.gather(-1, ids[:, -width:].unsqueeze(-1)).squeeze(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(dim=-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path("run"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    audit = Audit(Canary.conventions, every=4, on_finding="log", bundles=arguments.folder / "canary")
    group_ids = torch.arange(3).repeat_interleave(GROUP)
    for step in range(arguments.steps):
        ids, mask = sample(model, [[1, 5], [1, 6], [1, 7]])
        rewards = ((ids[:, -mask.shape[1] :] % 2 == 0) * mask).sum(dim=1) / mask.sum(dim=1)
        groups = rewards.view(-1, GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
        versions = torch.full((len(ids),), step)
        known = {"rewards": rewards, "group_ids": group_ids, "advantages": advantages, "versions": versions}
        with audit.update(mask=mask, model=model, trainer_version=step, **known) as update:
            optimizer.zero_grad()
            logprobs, entropy = score(model, ids, mask.shape[1])
            update.watch(logprobs, entropy=entropy)
            loss = policy_loss(logprobs, logprobs.detach(), advantages, mask)
            loss.backward()
            optimizer.step()
            update.log({"loss": loss, "reward": rewards.mean()})
        print(f"step {step}  reward {rewards.mean():.3f}  loss {loss.detach():.4f}")
    for finding in audit.findings:
        print(finding)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning, module="transformers")
    main()
