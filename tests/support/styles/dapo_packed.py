"""DAPO on packed sequences: all rows in one sequence without padding, token means, a higher upper bound, groups filtered.

Micro-batches are packs of at most so many tokens. A pack is one row whose attention is causal within each document.
"""

from dataclasses import replace
from itertools import pairwise

import torch

from rlcanary.contract.adapter import NotProvided, TrainState
from rlcanary.contract.batch import CollatedBatch, Completion, Group, LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions
from styles.reporting import OF_TABLES, TableOfRows

PACK = 24


class Document:
    """One row of a batch in a pack: its ids, and which of its completion's tokens are trained."""

    def __init__(self, batch, row):
        attended = batch.attention_mask[row]
        self.row = row
        self.ids = batch.input_ids[row][attended]
        self.prompt = int(attended[: int(batch.completion_starts[row])].sum())
        self.length = len(self.ids) - self.prompt


def packs(batch):
    """Documents in order, in packs of at most PACK tokens; a longer document has a pack of its own."""
    pack, tokens = [], 0
    for row in range(len(batch.rewards)):
        document = Document(batch, row)
        if pack and tokens + len(document.ids) > PACK:
            yield pack
            pack, tokens = [], 0
        pack.append(document)
        tokens += len(document.ids)
    if pack:
        yield pack


class DapoPacked(TableOfRows):
    name = "dapo-packed-by-hand"
    conventions = Conventions(
        **OF_TABLES,
        clip_low=0.2,
        clip_high=0.28,
        aggregation="token_mean",
        advantage_eps=1e-8,
        dual_clip=10.0,
        max_grad_norm=1.0,
        data_order="sequential",
        sync_while_sampling=False,
    )

    def packed_logprobs(self, model, batch, temperature):
        return self._scored(model, batch, [Document(batch, row) for row in range(len(batch.rewards))], temperature)[0]

    def _scored(self, model, batch, pack, temperature):
        """Logprobs and entropies [B, T], NaN where nothing was scored."""
        layers = set(getattr(model.config, "layer_types", None) or ())
        if layers - {"full_attention"} or getattr(model.config, "sliding_window", None):
            raise NotProvided("packs rows for full attention only")
        lengths = torch.tensor([len(document.ids) for document in pack])
        owner = torch.repeat_interleave(torch.arange(len(pack)), lengths)
        ids = torch.cat([document.ids for document in pack])
        positions = torch.cat([torch.arange(length) for length in lengths])
        may_see = (owner[:, None] == owner) & (torch.arange(len(ids))[:, None] >= torch.arange(len(ids)))
        bias = torch.where(may_see, 0.0, torch.finfo(torch.float32).min)[None, None]
        logits = model(input_ids=ids[None], attention_mask=bias, position_ids=positions[None]).logits[0]
        logits = logits.float() / temperature
        normal = torch.logsumexp(logits, dim=-1)
        spread = normal - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
        ends = lengths.cumsum(0).tolist()
        shape = batch.completion_ids.shape
        logprobs, entropies = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        for document, end in zip(pack, ends, strict=True):
            if not document.length:
                continue
            before = torch.arange(end - document.length - 1, end - 1)
            chosen = logits[before, ids[before + 1]] - normal[before]
            logprobs[document.row, : document.length] = chosen
            entropies[document.row, : document.length] = spread[before]
        return logprobs, entropies

    def token_logprobs(self, logits, token_ids, temperature):
        return torch.stack(
            [
                torch.log_softmax(row.float() / temperature, dim=-1)[torch.arange(len(ids)), ids]
                for row, ids in zip(logits, token_ids, strict=True)
            ]
        )

    def completion_mask(self, completion_ids, eos_token_ids, pad_token_id):
        is_end = sum(completion_ids == end for end in eos_token_ids).bool()
        first = torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1), completion_ids.shape[1])
        return torch.arange(completion_ids.shape[1]) <= first[:, None]

    def advantages(self, rewards, group_ids):
        if not torch.isfinite(rewards).all():
            raise ValueError("DAPO needs a reward for every completion")
        result = torch.zeros(len(rewards), dtype=torch.float64)
        for group in set(group_ids.tolist()):
            rows = (group_ids == group).nonzero().flatten()
            earned = rewards[rows].double()
            if self.keep_group(earned):
                result[rows] = (earned - earned.mean()) / (earned.std() + self.conventions.advantage_eps)
        return result.to(rewards.dtype)

    def keep_group(self, rewards):
        """DAPO's dynamic sampling, for any rewards."""
        return len(rewards) > 1 and not torch.equal(rewards, rewards[:1].expand_as(rewards))

    def policy_loss(self, batch):
        return self._update([batch], batch)

    def accumulated_loss(self, batch, n_micro):
        bounds = [len(batch.mask) * piece // n_micro for piece in range(n_micro + 1)]
        rows = torch.arange(len(batch.mask))
        return self._update([batch.rows(rows[a:b]) for a, b in pairwise(bounds)], batch)

    def _update(self, pieces, whole):
        tokens = max(int(whole.mask.sum()) if whole.global_tokens is None else whole.global_tokens, 1)
        loss = sum(self._token_losses(piece)[0].sum() for piece in pieces) / tokens
        with torch.no_grad():
            _, ratio, clipped = self._token_losses(whole)
        ratio, clipped = ratio[whole.mask], clipped[whole.mask]
        if not len(ratio):
            return LossOutput(loss)
        metrics = {"ratio_mean": ratio.mean(), "ratio_min": ratio.min(), "ratio_max": ratio.max()}
        metrics["clip_fraction"] = clipped.double().mean()
        if whole.entropy is not None:
            metrics["entropy"] = whole.entropy[whole.mask].mean()
        return LossOutput(loss, {name: float(value.detach()) for name, value in metrics.items()})

    def _token_losses(self, batch):
        c, mask = self.conventions, batch.mask
        new = batch.logprobs.where(mask, torch.zeros(()))
        old = batch.old_logprobs.where(mask, torch.zeros(()))
        a = batch.advantages.reshape(len(mask), -1).expand_as(mask)
        ratio = torch.exp(new - old)
        # PPO writes a maximum of losses; the dual clip is a ceiling on those of negative advantages.
        plain, held = -a * ratio, -a * ratio.clamp(1 - c.clip_low, 1 + c.clip_high)
        losses = torch.maximum(plain, held)
        losses = torch.where(a < 0, torch.minimum(losses, -a * c.dual_clip), losses)
        clipped = ((a > 0) & (ratio > 1 + c.clip_high)) | ((a < 0) & ((ratio < 1 - c.clip_low) | (ratio > c.dual_clip)))
        return losses.where(mask, torch.zeros(())), ratio, clipped

    def make_batch(self, groups, pad_token_id):
        rows = [(place, group, slot) for place, group in enumerate(groups) for slot in range(len(group.completions))]
        size = max(len(group.prompt_ids) + len(group.completions[slot].token_ids) for _, group, slot in rows)
        width = max(len(group.completions[slot].token_ids) for _, group, slot in rows)
        count = len(rows)
        batch = CollatedBatch(
            input_ids=torch.full((count, size), pad_token_id),
            attention_mask=torch.zeros(count, size, dtype=torch.bool),
            position_ids=torch.zeros(count, size, dtype=torch.long),
            completion_starts=torch.zeros(count, dtype=torch.long),
            completion_ids=torch.full((count, width), pad_token_id),
            completion_mask=torch.zeros(count, width, dtype=torch.bool),
            rewards=torch.zeros(count),
            group_ids=torch.zeros(count, dtype=torch.long),
            old_logprobs=torch.full((count, width), torch.nan),
            policy_versions=torch.zeros(count, dtype=torch.long),
        )
        for row, (place, group, slot) in enumerate(rows):
            completion = group.completions[slot]
            prompt, length = len(group.prompt_ids), len(completion.token_ids)
            batch.input_ids[row, : prompt + length] = torch.tensor([*group.prompt_ids, *completion.token_ids])
            batch.attention_mask[row, : prompt + length] = True
            batch.position_ids[row, : prompt + length] = torch.arange(prompt + length)
            batch.completion_starts[row] = prompt
            batch.completion_ids[row, :length] = torch.tensor(list(completion.token_ids), dtype=torch.long)
            drawn = [True] * length if completion.sampled is None else list(completion.sampled)
            batch.completion_mask[row, :length] = torch.tensor(drawn, dtype=torch.bool)
            batch.rewards[row] = group.rewards[slot]
            batch.group_ids[row] = place
            batch.policy_versions[row] = group.policy_version
            batch.item_ids.append(group.item_id)
            if completion.logprobs is not None:
                batch.old_logprobs[row, :length] = torch.tensor(list(completion.logprobs))
        if batch.old_logprobs.isnan().all():
            batch.old_logprobs = None
        return batch

    def data_order(self, n_items, epoch, rank, world_size):
        steps = (n_items + world_size - 1) // world_size
        return [(step * world_size + rank) % n_items for step in range(steps)]

    def rollout(self, engine, items, sampling):
        """One batched request per number of completions; items may share a prompt, so answers go by place."""
        answers = engine.generate([item.prompt_ids for item in items], sampling)
        groups = []
        for item, completions in zip(items, answers, strict=True):
            rewards = [item.reward(completion.text) for completion in completions]
            if None in rewards:
                raise NotProvided("a completion without a reward is sampled again")
            groups.append(Group(tuple(item.prompt_ids), tuple(completions), rewards, item_id=item.id))
        return [replace(group, policy_version=engine.version) for group in groups]

    def generate(self, engine, prompts, sampling):
        """Prompt by prompt."""
        groups = []
        for prompt in prompts:
            groups += engine.generate([prompt], sampling)
        return [
            [Completion(list(each.token_ids), each.logprobs, each.finish_reason) for each in group] for group in groups
        ]

    def new_state(self, model, ref_model, learning_rate):
        """NAdam with a schedule of steps."""
        optimizer = torch.optim.NAdam(model.parameters(), lr=learning_rate)
        return TrainState(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5), ref_model)

    def train_step(self, state, batch):
        if batch.old_logprobs is None:
            raise NotProvided("the sampler's logprobs are the old ones")
        advantages = self.advantages(batch.rewards, batch.group_ids)
        tokens = float(batch.completion_mask.sum())
        was = [(module, module.training) for module in state.model.modules()]
        state.model.eval()
        state.optimizer.zero_grad()
        logprobs = torch.full(batch.completion_ids.shape, torch.nan)
        entropies = logprobs.clone()
        for pack in packs(batch):
            rows = torch.tensor([document.row for document in pack])
            scored, spread = self._scored(state.model, batch, pack, self.conventions.temperature)
            piece = PolicyBatch(scored, batch.old_logprobs, advantages, batch.completion_mask, entropy=spread)
            piece = replace(piece.rows(rows), global_tokens=tokens)
            self._update([piece], piece).loss.backward()
            logprobs[rows], entropies[rows] = scored[rows].detach(), spread[rows].detach()
        for module, training in was:
            module.training = training
        norm = torch.nn.utils.clip_grad_norm_(list(state.model.parameters()), self.conventions.max_grad_norm)
        rate = state.optimizer.param_groups[0]["lr"]
        state.optimizer.step()
        state.scheduler.step()
        whole = PolicyBatch(logprobs, batch.old_logprobs, advantages, batch.completion_mask, entropy=entropies)
        return {
            **self.policy_loss(whole).metrics,
            "grad_norm": norm.item(),
            "lr": rate,
            "tokens": int(batch.attention_mask.sum()),
        }
