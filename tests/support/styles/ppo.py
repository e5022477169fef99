"""PPO and REINFORCE++: credit of tokens, once row by row over lists and once for the whole batch at a time.

PPO walks through the trained tokens of each row and sums TD errors with their weights. REINFORCE++ keeps running sums over
the columns, which tokens of tools leave as they are. Both whiten as TRL and verl do, by 1 / sqrt(variance + 1e-8).
"""

import math

import torch

from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.credit import Credit


def whiten(values, mask):
    """Whiten by mean and variance with Bessel's correction over the mask."""
    count = mask.sum()
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / (count - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8)


class Configurable(Adapter):
    options = ()

    def __init__(self, **changes):
        self.conventions = self.conventions.replace(**changes)

    def configured(self, **changes):
        unknown = sorted({name for name in changes if name not in self.options})
        if unknown or changes.get("whitening") in ("mean", "std"):
            raise NotProvided(f"the launcher has no option for {', '.join(unknown) or 'half a whitening'}")
        return type(self)(**{name: getattr(self.conventions, name) for name in self.options} | changes)


class Ppo(Configurable):
    name = "ppo-by-hand"
    options = ("discount", "gae_lambda", "critic_lambda", "value_clip", "temperature", "whitening")
    conventions = Conventions(
        advantage_baseline="none",
        advantage_scale="none",
        aggregation="token_mean",
        token_credit="gae",
        gae_lambda=0.9,
        whitening="mean_std",
        whitening_singleton="nan",
        value_clip=0.3,
        value_aggregation="sequence_mean_nonempty",
    )

    def token_advantages(self, batch):
        c = self.conventions
        advantages, returns = torch.zeros(batch.mask.shape), torch.zeros(batch.mask.shape)
        for row, mask in enumerate(batch.mask):
            places = mask.nonzero().flatten().tolist()
            values = [*batch.values[row][places].tolist(), 0.0]
            extra = [0.0] * len(places) if batch.token_rewards is None else batch.token_rewards[row][places].tolist()
            if extra:
                extra[-1] += float(batch.rewards[row])
            errors = [extra[i] + c.discount * values[i + 1] - values[i] for i in range(len(places))]
            critic_lambda = c.gae_lambda if c.critic_lambda is None else c.critic_lambda
            for index, place in enumerate(places):
                later = list(enumerate(errors[index:]))
                advantages[row, place] = math.fsum((c.discount * c.gae_lambda) ** k * error for k, error in later)
                gain = math.fsum((c.discount * critic_lambda) ** k * error for k, error in later)
                returns[row, place] = values[index] + gain
        return Credit(advantages if c.whitening == "none" else whiten(advantages, batch.mask), returns)

    def value_loss(self, batch):
        clip, mask = self.conventions.value_clip, batch.mask
        values, returns = (each.masked_fill(~mask, 0.0) for each in (batch.values, batch.returns))
        errors = (values - returns) ** 2
        if clip is not None:
            old = batch.old_values.masked_fill(~mask, 0.0)
            held = (old + (values - old).clamp(-clip, clip) - returns) ** 2
            errors = torch.where(held > errors, held, errors)
        lengths = mask.sum(dim=1)
        rows = (lengths > 0).sum() if batch.global_sequences is None else batch.global_sequences
        return LossOutput(0.5 * (errors.sum(dim=1) / lengths.clamp(min=1)).sum() / max(float(rows), 1.0))

    def values(self, model, batch):
        """One row at a time, without its padding."""
        found = torch.full(batch.completion_ids.shape, math.nan)
        for row, attended in enumerate(batch.attention_mask):
            ids = batch.input_ids[row][attended]
            start = int(attended[: batch.completion_starts[row]].sum())
            scores = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).logits.squeeze()
            found[row, : len(ids) - start] = scores.reshape(-1)[start - 1 : len(ids) - 1]
        return found


class ReinforcePlusPlus(Configurable):
    """The variant with the mean of the group as baseline."""

    name = "reinforce++-by-hand"
    options = ("discount",)
    conventions = Conventions(
        advantage_scale="none",
        token_credit="returns",
        whitening="mean_std",
        whitening_singleton="nan",
        discount=0.95,
    )

    def token_advantages(self, batch):
        _, group = batch.group_ids.unique(return_inverse=True)
        totals = torch.zeros(int(group.max()) + 1).index_add(0, group, batch.rewards)
        centred = batch.rewards - (totals / group.bincount())[group]
        mask = batch.mask.float()
        running, started, columns = torch.zeros(len(mask)), torch.zeros(len(mask), dtype=torch.bool), []
        for column in reversed(range(mask.shape[1])):
            here = batch.mask[:, column]
            reward = torch.where(here & ~started, centred, 0.0)
            if batch.token_rewards is not None:
                reward = reward + batch.token_rewards[:, column] * mask[:, column]
            running = torch.where(here, reward + self.conventions.discount * running, running)
            started = started | here
            columns.insert(0, running)
        return Credit(whiten(torch.stack(columns, dim=1), mask) * mask)
