"""GRPO in one file: a small recurrent policy learns to answer with the token that follows the prompt's.

    python train.py [--steps 60]

Tensors carry their shapes: B completions, T their tokens, S prompt and completion together, V the vocabulary.
"""

import argparse

import torch

VOCABULARY, PAD, EOS, GROUP, LENGTH = 16, 0, 1, 8, 3


class Policy(torch.nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.cell = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, ids_BS):
        return self.head(self.cell(self.embedding(ids_BS))[0])


def token_logprobs(logits_BTV, ids_BT, temperature=1.0):
    logprobs_BTV = (logits_BTV.float() / temperature).log_softmax(dim=-1)
    return logprobs_BTV.gather(-1, ids_BT.unsqueeze(-1)).squeeze(-1)


def completion_mask(ids_BT, eos=EOS):
    """The tokens up to the end of sequence, that one included."""
    is_eos_BT = (ids_BT == eos).long()
    return is_eos_BT.cumsum(dim=1) - is_eos_BT == 0


def group_advantages(rewards_B, group_ids_B):
    advantages_B = torch.zeros_like(rewards_B)
    for group_id in group_ids_B.unique():
        group = rewards_B[group_ids_B == group_id].double()
        if len(group) > 1 and group.min() != group.max():
            scaled = (group - group.mean()) / (group.std() + 1e-6)
            advantages_B[group_ids_B == group_id] = scaled.to(rewards_B.dtype)
    return advantages_B


def policy_loss(logprobs_BT, old_logprobs_BT, advantages_B, mask_BT):
    """PPO's clipped loss, a mean over the trained tokens of the batch."""
    ratio_BT = (logprobs_BT - old_logprobs_BT).masked_fill(~mask_BT, 0).exp()
    advantages_B1 = advantages_B.unsqueeze(1)
    losses_BT = -torch.minimum(ratio_BT * advantages_B1, ratio_BT.clamp(0.8, 1.2) * advantages_B1)
    return losses_BT[mask_BT].sum() / mask_BT.sum().clamp(min=1)


@torch.no_grad()
def sample(policy, prompts_B1):
    """Sample completions -> ids [B, 1 + T]."""
    ids_BS = prompts_B1
    for _ in range(LENGTH):
        probabilities_BV = policy(ids_BS)[:, -1].softmax(dim=-1)
        ids_BS = torch.cat([ids_BS, torch.multinomial(probabilities_BV, 1)], dim=1)
    return ids_BS


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    group_ids_B = torch.arange(4).repeat_interleave(GROUP)
    for step in range(steps):
        prompts_B1 = torch.randint(2, VOCABULARY - 1, (4, 1)).repeat_interleave(GROUP, dim=0)
        ids_BS = sample(policy, prompts_B1)
        completions_BT = ids_BS[:, 1:]
        rewards_B = (completions_BT[:, 0] == prompts_B1[:, 0] + 1).float()
        advantages_B, mask_BT = group_advantages(rewards_B, group_ids_B), completion_mask(completions_BT)
        with torch.no_grad():
            old_logprobs_BT = token_logprobs(policy(ids_BS)[:, :-1], completions_BT)
        for _ in range(2):
            logprobs_BT = token_logprobs(policy(ids_BS)[:, :-1], completions_BT)
            loss = policy_loss(logprobs_BT, old_logprobs_BT, advantages_B, mask_BT)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1}  reward {rewards_B.mean():.3f}  loss {loss.detach():.4f}")


if __name__ == "__main__":
    main()
