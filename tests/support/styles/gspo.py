"""GSPO: one ratio per sequence, clipped tightly; the trainer scores the old logprobs itself; sequences count alike.

The ratio is taken against the trainer's own logprobs before the update, so the first update of a batch has ratio 1.
An Adamax with a warm-up that starts above zero; ranks average their gradients, as DDP does.
"""

import torch
from torch.nn.functional import cross_entropy, pad

from rlcanary.contract.adapter import Adapter, NotProvided, TrainState
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions
from styles.buffers import Pool

EPS = 1e-6


def sequence_means(values, mask):
    """[B, T] -> [B], zero for a row without a token."""
    return torch.where(mask, values, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


class Gspo(Pool, Adapter):
    name = "gspo-by-hand"
    conventions = Conventions(
        ratio_level="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        advantage_ddof=0,
        advantage_eps=EPS,
        old_logprobs="trainer",
        max_grad_norm=1.0,
        kl_estimator="k2",
        buffer_order=None,
        buffer_full="drop_oldest",
    )

    def __init__(self, **changes):
        self.conventions = self.conventions.replace(**changes)

    def configured(self, **changes):
        changed = {name for name, value in changes.items() if getattr(self.conventions, name) != value}
        if changed - {"kl_coef", "temperature", "max_grad_norm", "entropy_coef"}:
            raise NotProvided(f"the launcher has no option for {', '.join(sorted(changed))}")
        made = type(self)()
        made.conventions = self.conventions.replace(**changes)
        return made

    # Scoring.

    def token_logprobs(self, logits, token_ids, temperature):
        flat = logits.float().flatten(0, -2) / temperature
        return -cross_entropy(flat, token_ids.flatten(), reduction="none").view(token_ids.shape)

    def entropy(self, logits):
        return torch.distributions.Categorical(logits=logits.clamp(min=-1e30)).entropy()

    def completion_logprobs(self, model, batch, temperature):
        return self._scored(model, batch, temperature)[0]

    def _scored(self, model, batch, temperature):
        """Score whole sequences, then cut each row's completion out."""
        output = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), position_ids=batch.position_ids
        )
        logits = output.logits[:, :-1]
        whole = self.token_logprobs(logits, batch.input_ids[:, 1:], temperature)
        entropies = self.entropy(logits / temperature)
        width = batch.completion_ids.shape[1]
        rows = range(len(batch.input_ids))
        starts = batch.completion_starts.tolist()

        def cut(values):
            # Behind the end of a short row stands nothing that counts.
            return torch.stack([pad(values[row], (0, width))[starts[row] - 1 :][:width] for row in rows])

        return cut(whole), cut(entropies)

    # Advantages and loss.

    def advantages(self, rewards, group_ids):
        if not rewards.isfinite().all():
            raise ValueError("rewards have to be finite")
        groups, index = group_ids.unique(return_inverse=True)
        member = torch.nn.functional.one_hot(index, len(groups)).double()
        size = member.sum(dim=0)
        # Rewards are taken relative to their group's first, which makes a constant group exactly zero.
        first = torch.stack([rewards[index == group][0] for group in range(len(groups))]).double()
        shifted = rewards.double() - first[index]
        centred = shifted - (shifted @ member / size)[index]
        variance = centred.square() @ member / size
        return (centred / (variance.sqrt()[index] + EPS)).to(rewards.dtype)

    def policy_loss(self, batch):
        losses, metrics = self._row_losses(batch)
        return LossOutput(losses.sum() / self._rows(batch), metrics)

    def accumulated_loss(self, batch, n_micro):
        rows = torch.arange(len(batch.mask))
        pieces = [self._row_losses(batch.rows(rows[piece::n_micro]))[0].sum() for piece in range(n_micro)]
        return LossOutput(torch.stack(pieces).sum() / self._rows(batch), self._row_losses(batch)[1])

    def sharded_loss(self, batch, n_ranks):
        """DDP averages, so each rank multiplies its share by the number of ranks."""
        shares = []
        for rank in range(n_ranks):
            mine = torch.arange(rank, len(batch.mask), n_ranks)
            shares.append(n_ranks * self._row_losses(batch.rows(mine))[0].sum() / self._rows(batch))
        return LossOutput(torch.stack(shares).mean(), self._row_losses(batch)[1])

    @staticmethod
    def _rows(batch):
        return len(batch.mask) if batch.global_sequences is None else batch.global_sequences

    def _row_losses(self, batch):
        c, mask = self.conventions, batch.mask
        token_advantage = batch.advantages if batch.advantages.ndim == 2 else batch.advantages[:, None]
        advantage = token_advantage.expand(mask.shape).masked_fill(~mask, 0)
        current = torch.where(mask, batch.logprobs, 0.0)
        ratio, surrogate, out = self._surrogate(current, torch.where(mask, batch.old_logprobs, 0.0), advantage, mask)
        rows = -sequence_means(surrogate, mask)
        metrics = {"clip_fraction": out[mask].double().mean(), "ratio_mean": ratio[mask].double().mean()}
        if mask.any():
            metrics |= {"ratio_min": ratio[mask].min(), "ratio_max": ratio[mask].max()}
        if batch.ref_logprobs is not None:
            kl = self.kl(current, torch.where(mask, batch.ref_logprobs, 0.0))
            metrics["kl"] = kl[mask].double().mean()
            if c.kl_coef:
                rows = rows + c.kl_coef * sequence_means(kl, mask)
        if batch.entropy is not None:
            metrics["entropy"] = batch.entropy[mask].double().mean()
            if c.entropy_coef:
                rows = rows - c.entropy_coef * sequence_means(batch.entropy, mask)
        if batch.sampler_logprobs is not None:
            metrics["mult_prob_error"] = (batch.old_logprobs - batch.sampler_logprobs)[mask].double().abs().exp().mean()
        return rows, {name: float(value.detach()) for name, value in metrics.items()}

    def _surrogate(self, current, old, advantage, mask):
        """Return ratios, terms, and which of them are clipped, each [B, T]."""
        c = self.conventions
        ratio = sequence_means(current - old, mask).exp()[:, None].expand(mask.shape)
        bounded = ratio.clamp(1 - c.clip_low, 1 + c.clip_high)
        out = (ratio < 1 - c.clip_low) & (advantage < 0) | (ratio > 1 + c.clip_high) & (advantage > 0)
        return ratio, torch.min(ratio * advantage, bounded * advantage), out

    def kl(self, logprobs, ref_logprobs):
        return (logprobs - ref_logprobs) ** 2 / 2

    # Data and training.

    def data_order(self, n_items, epoch, rank, world_size):
        order = torch.randperm(n_items, generator=torch.Generator().manual_seed(977 + epoch)).tolist()
        order += order[: -n_items % world_size] * world_size
        return order[: -(-n_items // world_size) * world_size][rank::world_size]

    def new_state(self, model, ref_model, learning_rate):
        optimizer = torch.optim.Adamax(model.parameters(), lr=learning_rate)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=4)
        return TrainState(model, optimizer, warm_up, ref_model)

    def train_step(self, state, batch):
        was_training = [module for module in state.model.modules() if module.training]
        state.model.eval()
        temperature = self.conventions.temperature
        logprobs, entropy = self._scored(state.model, batch, temperature)
        reference = batch.ref_logprobs
        if reference is None and state.ref_model is not None:
            with torch.no_grad():
                reference = self._scored(state.ref_model.eval(), batch, temperature)[0]
        loss, metrics = self._row_losses(
            PolicyBatch(
                logprobs=logprobs,
                old_logprobs=logprobs.detach(),
                advantages=self.advantages(batch.rewards, batch.group_ids),
                mask=batch.completion_mask,
                ref_logprobs=reference,
                sampler_logprobs=batch.old_logprobs,
                entropy=entropy,
            )
        )
        state.optimizer.zero_grad()
        loss.mean().backward()
        for module in was_training:
            module.training = True
        limit = self.conventions.max_grad_norm
        metrics["grad_norm"] = float(torch.nn.utils.clip_grad_norm_(state.model.parameters(), limit or float("inf")))
        metrics["lr"] = state.optimizer.param_groups[0]["lr"]
        state.optimizer.step()
        state.scheduler.step()
        return metrics

    def evaluate(self, state):
        """Greedy, without a cache, on the training model itself; the text is the ids."""
        if not state.eval_items:
            return {}
        was_training = [module for module in state.model.modules() if module.training]
        state.model.eval()
        rewards = []
        with torch.no_grad():
            for item in state.eval_items:
                ids = list(item.prompt_ids)
                for _ in range(4):
                    ids.append(int(state.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
                rewards.append(item.reward(" ".join(map(str, ids[len(item.prompt_ids) :]))))
        for module in was_training:
            module.training = True
        return {"reward": sum(rewards) / len(rewards)}
