"""Dr. GRPO: centred rewards, token ratios clipped, every token weighted alike by a constant; micro-batches of two rows.

Padding stands on the right. The loss is a sum over tokens divided by rows × C, so pieces of a batch simply add up.
Shapes: B rows, T completion positions, S sequence positions, V vocabulary.
"""

import asyncio
from collections import defaultdict

import torch
from torch import nn

from rlcanary.contract.adapter import NotProvided, TrainState
from rlcanary.contract.batch import CollatedBatch, Group, LossOutput
from rlcanary.contract.conventions import Conventions
from styles.layouts import ContiguousRanks

BUDGET = 12.0
ROWS_PER_PASS = 2


def score(logits, ids, temperature):
    """Logprobs of ids under logits that the caller hands over: they are divided in place, as a second copy is large."""
    logits = logits.float()
    logits /= temperature
    return logits.gather(-1, ids[..., None])[..., 0] - logits.logsumexp(-1)


def forward(model, batch, rows, temperature):
    """[len(rows), T] logprobs and entropies from one pass."""
    inputs = {name: getattr(batch, name)[rows] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**inputs).logits
    before = batch.completion_starts[rows][:, None] - 1 + torch.arange(batch.completion_ids.shape[1])
    before = before.clamp(max=logits.shape[1] - 1)
    logits = logits.gather(1, before[..., None].expand(-1, -1, logits.shape[-1]))
    logprobs = score(logits, batch.completion_ids[rows], temperature)
    p = logits.softmax(-1)
    return logprobs, logits.logsumexp(-1) - (p * logits).sum(-1)


class Sums:
    """What pieces of an update add up to, for the dashboard."""

    def __init__(self):
        self.total, self.tokens, self.low, self.high = defaultdict(float), 0, float("inf"), -float("inf")

    def add(self, keep, **values):
        self.tokens += int(keep.sum())
        for name, value in values.items():
            self.total[name] += float(value.detach()[keep].double().sum())
        if keep.any():
            self.low = min(self.low, float(values["ratio_mean"].detach()[keep].min()))
            self.high = max(self.high, float(values["ratio_mean"].detach()[keep].max()))

    def logged(self):
        means = {name: total / self.tokens if self.tokens else float("nan") for name, total in self.total.items()}
        if not self.tokens:
            return means
        return {**means, "ratio_min": self.low, "ratio_max": self.high}


class DrGrpo(ContiguousRanks):
    name = "dr-grpo-by-hand"
    conventions = Conventions(
        advantage_scale="none",
        aggregation="constant",
        aggregation_constant=BUDGET,
        max_grad_norm=1.0,
        epochs_per_rollout=2,
        mini_batches=2,
    )

    def token_logprobs(self, logits, token_ids, temperature):
        return score(logits.clone(), token_ids, temperature)

    def entropy(self, logits):
        logp = logits.log_softmax(-1)
        return -torch.where(logp > -torch.inf, logp.exp() * logp, 0.0).sum(-1)

    def completion_logprobs(self, model, batch, temperature):
        return forward(model, batch, torch.arange(len(batch.rewards)), temperature)[0]

    def completion_mask(self, completion_ids, eos_token_ids, pad_token_id):
        keep = torch.zeros_like(completion_ids, dtype=torch.bool)
        ends = set(eos_token_ids)
        for row, ids in enumerate(completion_ids.tolist()):
            length = next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))
            keep[row, :length] = True
        return keep

    def advantages(self, rewards, group_ids):
        if rewards.isnan().any():
            raise ValueError("a reward is NaN")
        centred = rewards.clone()
        for group in group_ids.unique():
            rows = group_ids == group
            centred[rows] = (rewards[rows].double() - rewards[rows].double().mean()).to(rewards.dtype)
        return centred

    def policy_loss(self, batch):
        sums = Sums()
        return LossOutput(self._piece(batch, len(batch.mask), sums), sums.logged())

    def accumulated_loss(self, batch, n_micro):
        sums = Sums()
        pieces = torch.arange(len(batch.mask)).tensor_split(n_micro)
        return LossOutput(sum(self._piece(batch.rows(rows), len(batch.mask), sums) for rows in pieces), sums.logged())

    def sharded_loss(self, batch, n_ranks):
        """Each rank divides by the rows of all, and the reduction is a sum."""
        return self.accumulated_loss(batch, n_ranks)

    def _piece(self, batch, rows_in_update, sums):
        if batch.global_sequences is not None:
            rows_in_update = batch.global_sequences
        keep = batch.mask.bool()
        a = batch.advantages if batch.advantages.ndim == 2 else batch.advantages[:, None].expand(keep.shape)
        # Padding first becomes harmless, then takes part in the arithmetic.
        logprobs = batch.logprobs.masked_fill(~keep, 0)
        old = batch.old_logprobs.masked_fill(~keep, 0)
        ratio = (logprobs - old).exp()
        low, high = 1 - self.conventions.clip_low, 1 + self.conventions.clip_high
        gain = torch.minimum(ratio * a, ratio.clamp(low, high) * a)
        clipped = ((a > 0) & (ratio > high)) | ((a < 0) & (ratio < low))
        logged = {"ratio_mean": ratio, "clip_fraction": clipped.double()}
        if batch.entropy is not None:
            logged["entropy"] = batch.entropy
        sums.add(keep, **logged)
        return -gain.masked_fill(~keep, 0).sum() / (rows_in_update * BUDGET)

    def make_batch(self, groups, pad_token_id):
        rows = [(index, group, each) for index, group in enumerate(groups) for each in group.completions]
        rewards = [reward for group in groups for reward in group.rewards]
        width = max(len(group.prompt_ids) + len(each.token_ids) for _, group, each in rows)
        longest = max(len(each.token_ids) for _, _, each in rows)

        def filled(values, size, filling):
            return [*values, *[filling] * (size - len(values))]

        def gaps(each):
            return [float("nan")] * len(each.token_ids) if each.logprobs is None else list(each.logprobs)

        def trained(each):
            return [True] * len(each.token_ids) if each.sampled is None else list(each.sampled)

        sequences = [[*group.prompt_ids, *each.token_ids] for _, group, each in rows]
        scored = any(each.logprobs is not None for _, _, each in rows)
        logprobs = [filled(gaps(each), longest, float("nan")) for _, _, each in rows]
        return CollatedBatch(
            input_ids=torch.tensor([filled(ids, width, pad_token_id) for ids in sequences]),
            attention_mask=torch.tensor([filled([True] * len(ids), width, False) for ids in sequences]),
            position_ids=torch.tensor([filled(range(len(ids)), width, 0) for ids in sequences]),
            completion_starts=torch.tensor([len(group.prompt_ids) for _, group, _ in rows]),
            completion_ids=torch.tensor([filled(each.token_ids, longest, pad_token_id) for _, _, each in rows]),
            completion_mask=torch.tensor([filled(trained(each), longest, False) for _, _, each in rows]),
            rewards=torch.tensor(rewards),
            group_ids=torch.tensor([index for index, _, _ in rows]),
            old_logprobs=torch.tensor(logprobs) if scored else None,
            policy_versions=torch.tensor([group.policy_version for _, group, _ in rows]),
            item_ids=[group.item_id for _, group, _ in rows],
        )

    def keep_group(self, rewards):
        return bool(rewards.min() < rewards.max())

    def score(self, items, completions):
        rewards = []
        for item, text in zip(items, completions, strict=True):
            try:
                reward = item.reward(text)
            except Exception:  # noqa: BLE001 - a verifier may raise anything; its completion then has no reward
                reward = None
            rewards.append(float("nan") if reward is None else float(reward))
        return torch.tensor(rewards)

    def rollout(self, engine, items, sampling):
        async def one(item):
            version = engine.version
            completions = await engine.agenerate(list(item.prompt_ids), dict(sampling))
            rewards = self.score([item] * len(completions), [each.text for each in completions])
            return Group(item.prompt_ids, completions, rewards.tolist(), item_id=item.id, policy_version=version)

        async def everything():
            return await asyncio.gather(*map(one, items))

        return asyncio.run(everything())

    def new_state(self, model, ref_model, learning_rate):
        """Decay on matrices only, a second moment of short memory, a cosine over a thousand updates."""
        matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
        vectors = [weight for weight in model.parameters() if weight.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
        return TrainState(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000), ref_model)

    def train_step(self, state, batch):
        advantages = self.advantages(batch.rewards, batch.group_ids)
        return self._update(state, batch, advantages, torch.arange(len(batch.rewards)))

    def rl_step(self, state, groups, pad_token_id):
        """Two epochs over shuffled completions, whose groups may be torn apart."""
        batch = self.make_batch(groups, pad_token_id)
        advantages = self.advantages(batch.rewards, batch.group_ids)
        for _ in range(self.conventions.epochs_per_rollout):
            for rows in torch.randperm(len(batch.rewards)).tensor_split(self.conventions.mini_batches):
                metrics = self._update(state, batch, advantages, rows)
        return metrics

    def _update(self, state, batch, advantages, chosen):
        if batch.old_logprobs is None:
            raise NotProvided("the ratio is taken against the sampler's logprobs")
        model, sums = state.model, Sums()
        state.optimizer.zero_grad(set_to_none=True)
        modes = {module: module.training for module in model.modules()}
        model.eval()
        for rows in chosen.split(ROWS_PER_PASS):
            logprobs, entropy = forward(model, batch, rows, self.conventions.temperature)
            piece = Piece(logprobs, batch.old_logprobs[rows], advantages[rows], batch.completion_mask[rows], entropy)
            self._piece(piece, len(chosen), sums).backward()
        for module, training in modes.items():
            module.training = training
        norm = nn.utils.clip_grad_norm_(model.parameters(), self.conventions.max_grad_norm)
        rate = state.scheduler.get_last_lr()[0]
        state.optimizer.step()
        state.scheduler.step()
        return {
            **sums.logged(),
            "grad_norm": float(norm),
            "lr": rate,
            "tokens": float(batch.attention_mask[chosen].sum()),
            "reward": float(batch.rewards[chosen].mean()),
        }

    def token_losses(self, model, batch, rows, advantages):
        """[rows, T] the losses that ranks add up, and ratios."""
        logprobs, _ = forward(model, batch, rows, self.conventions.temperature)
        keep = batch.completion_mask[rows]
        ratio = (logprobs - batch.old_logprobs[rows].masked_fill(~keep, 0)).masked_fill(~keep, 0).exp()
        gain = ratio * advantages[:, None]
        held = ratio.clamp(1 - self.conventions.clip_low, 1 + self.conventions.clip_high) * advantages[:, None]
        return -torch.minimum(gain, held), ratio.detach()

    def divisor(self, batch):
        return len(batch.rewards) * BUDGET

    def evaluate(self, state):
        engine = self.new_engine(state.model)
        sampling = {"temperature": 0.0, "max_new_tokens": 6}
        rewards = []
        for item in state.eval_items:
            ((answer,),) = engine.generate([item.prompt_ids], sampling)
            rewards.append(item.reward(answer.text))
        return {"reward": sum(rewards) / len(rewards)} if rewards else {}

    def sync_weights(self, state, engine):
        engine.load_weights(state.model.named_parameters())
        engine.reset_prefix_cache()
        engine.version += 1


class Piece:
    """The part of a loss's batch that a pass over some rows has."""

    global_sequences = None

    def __init__(self, logprobs, old_logprobs, advantages, mask, entropy):
        self.logprobs, self.old_logprobs, self.advantages, self.mask = logprobs, old_logprobs, advantages, mask
        self.entropy = entropy
