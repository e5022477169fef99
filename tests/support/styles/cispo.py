"""CISPO: the detached, clipped ratio weighs the logprob; a token-level correction for the sampler, and an entropy bonus.

Token means over the whole update; the masters of the schedule and of the numbers that are logged are the trainer's own.
"""

import json

import numpy as np
import torch

from rlcanary.contract.adapter import TrainState
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions
from styles.buffers import Queue
from styles.reporting import ReducedOverRanks


class Cispo(Queue, ReducedOverRanks):
    name = "cispo-by-hand"
    conventions = Conventions(
        objective="cispo",
        clip_low=None,
        clip_high=4.0,
        aggregation="token_mean",
        advantage_scale="batch",
        advantage_eps=1e-5,
        advantage_eps_mode="clamp",
        entropy_coef=0.01,
        importance_level="token",
        importance_high=2.0,
        old_logprobs="trainer",
        temperature=0.8,
        max_grad_norm=0.5,
    )

    def token_logprobs(self, logits, token_ids, temperature):
        return torch.distributions.Categorical(logits=logits.float() / temperature, validate_args=False).log_prob(
            token_ids
        )

    def entropy(self, logits):
        probabilities = logits.float().softmax(dim=-1)
        return torch.special.entr(probabilities).sum(dim=-1)

    def completion_mask(self, completion_ids, eos_token_ids, pad_token_id):
        ended = torch.isin(completion_ids, torch.tensor(eos_token_ids)).int()
        return ended.cumsum(dim=1) - ended == 0

    def advantages(self, rewards, group_ids):
        values, groups = rewards.double().numpy(), group_ids.numpy()
        if not np.isfinite(values).all():
            raise ValueError("a reward is missing")
        centred = np.zeros_like(values)
        alone = np.zeros(len(values), dtype=bool)
        for group in np.unique(groups):
            rows = groups == group
            alone |= rows & (rows.sum() == 1)
            if values[rows].min() < values[rows].max():
                centred[rows] = values[rows] - values[rows].mean()
        spread = values.std(ddof=1) if len(values) > 1 and values.min() < values.max() else 0.0
        scaled = centred / max(spread, self.conventions.advantage_eps)
        return torch.tensor(np.where(alone, 0.0, scaled), dtype=rewards.dtype)

    def importance_weights(self, trainer_logprobs, sampler_logprobs, mask):
        with torch.no_grad():
            gap = torch.where(mask, trainer_logprobs - sampler_logprobs, 0.0)
            return gap.exp().clamp(max=self.conventions.importance_high) * mask

    def policy_loss(self, batch):
        return self._reduced([batch])

    def accumulated_loss(self, batch, n_micro):
        """Micro-batches balanced by tokens: the longest row goes to the emptiest piece."""
        lengths = batch.mask.sum(dim=1)
        pieces = [[] for _ in range(n_micro)]
        for row in lengths.argsort(descending=True).tolist():
            min(pieces, key=lambda piece: sum(int(lengths[each]) for each in piece) + len(piece)).append(row)
        return self._reduced([batch.rows(torch.tensor(piece, dtype=torch.long)) for piece in pieces if piece])

    def sharded_loss(self, batch, n_ranks):
        return self._reduced([batch.rows(rows) for rows in torch.arange(len(batch.mask)).chunk(n_ranks)])

    def _reduced(self, pieces):
        """Sums of all pieces over counts of all pieces, as an all-reduce of both gives them."""
        sums = [self._sums(piece) for piece in pieces]
        tokens = sum(int(piece.mask.sum()) for piece in pieces)
        divisor = pieces[0].global_tokens or tokens or 1
        total = {name: sum(each[name] for each in sums) for name in sums[0]}
        loss = (total.pop("policy") - self.conventions.entropy_coef * total["entropy"]) / divisor
        if not tokens:
            return LossOutput(loss, {})
        ratios = torch.cat([self._ratio(piece).detach()[piece.mask] for piece in pieces])
        metrics = {name: float(value.detach()) / tokens for name, value in total.items()}
        return LossOutput(loss, metrics | {"ratio_min": float(ratios.min()), "ratio_max": float(ratios.max())})

    @staticmethod
    def _ratio(batch):
        return torch.where(batch.mask, batch.logprobs - batch.old_logprobs, 0.0).exp()

    def _sums(self, batch):
        keep = batch.mask
        zero = torch.zeros_like(batch.old_logprobs)
        new, old = torch.where(keep, batch.logprobs, zero), torch.where(keep, batch.old_logprobs, zero)
        sampler = torch.where(keep, batch.sampler_logprobs, zero)
        entropy = torch.where(keep, batch.entropy, zero)
        advantage = torch.where(keep, batch.advantages.view(len(keep), -1), zero)
        ratio = (new.detach() - old).exp()
        ceiling = 1 + self.conventions.clip_high
        weight = ratio.clamp(max=ceiling) * self.importance_weights(old, sampler, keep)
        gap = (old - sampler).abs().exp()
        return {
            "policy": -(weight * advantage * new * keep).sum(),
            "entropy": entropy.sum(),
            "clip_fraction": ((ratio > ceiling) & (advantage != 0) & keep).double().sum(),
            "ratio_mean": ratio[keep].double().sum(),
            "mult_prob_error": gap[keep].double().sum(),
        }

    def accumulation_steps(self, batch_size, micro_batch_size, n_ranks, sequence_parallel):
        groups, rest = divmod(n_ranks, sequence_parallel)
        steps, left = divmod(batch_size, micro_batch_size * groups) if groups else (0, 1)
        if rest or left or not steps:
            raise ValueError("the batch does not divide over the ranks")
        return steps

    def data_order(self, n_items, epoch, rank, world_size):
        order = np.random.default_rng([41, epoch]).permutation(n_items)
        return np.resize(order, -(-n_items // world_size) * world_size)[rank::world_size].tolist()

    def resumed_order(self, n_items, consumed, count, rank, world_size):
        epoch, place = divmod(consumed, len(self.data_order(n_items, 0, rank, world_size)))
        rest = []
        while len(rest) < place + count:
            rest += self.data_order(n_items, epoch, rank, world_size)
            epoch += 1
        return rest[place : place + count]

    def _forward(self, model, batch):
        """Left-aligned rows in one pass, both numbers from one set of logits."""
        out = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids)
        width = batch.completion_ids.shape[1]
        places = batch.completion_starts.view(-1, 1) + torch.arange(-1, width - 1)
        places = places.clamp(max=out.logits.shape[1] - 1)
        logits = out.logits[torch.arange(len(places)).view(-1, 1), places] / self.conventions.temperature
        return self.token_logprobs(logits, batch.completion_ids, 1.0), self.entropy(logits)

    def new_state(self, model, ref_model, learning_rate):
        optimizer = torch.optim.RMSprop(model.parameters(), lr=learning_rate, alpha=0.95)
        return TrainState(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0), ref_model)

    def train_step(self, state, batch):
        modes = {name: module.training for name, module in state.model.named_modules()}
        state.model.eval()
        logprobs, entropy = self._forward(state.model, batch)
        output = self._reduced(
            [
                PolicyBatch(
                    logprobs=logprobs,
                    old_logprobs=logprobs.detach(),
                    advantages=self.advantages(batch.rewards, batch.group_ids),
                    mask=batch.completion_mask,
                    sampler_logprobs=batch.old_logprobs,
                    entropy=entropy,
                )
            ]
        )
        for name, module in state.model.named_modules():
            module.training = modes[name]
        parameters = [parameter for parameter in state.model.parameters() if parameter.requires_grad]
        # Gradients are set, not accumulated.
        for parameter, gradient in zip(parameters, torch.autograd.grad(output.loss, parameters), strict=True):
            parameter.grad = gradient
        norm = torch.stack([parameter.grad.double().norm() for parameter in parameters]).norm()
        shrink = min(1.0, self.conventions.max_grad_norm / float(norm)) if norm > 0 else 1.0
        for parameter in parameters:
            parameter.grad.mul_(shrink)
        (rate,) = {group["lr"] for group in state.optimizer.param_groups}
        state.optimizer.step()
        state.scheduler.step()
        return {**output.metrics, "grad_norm": float(norm), "lr": rate, "reward": float(batch.rewards.mean())}

    def save_checkpoint(self, state, folder):
        """Two files an update; a third one, written last, names the latest."""
        update = state.scheduler.last_epoch
        torch.save(state.model.state_dict(), folder / f"{update}-weights.pt")
        torch.save([state.optimizer.state_dict(), state.scheduler.state_dict()], folder / f"{update}-training.pt")
        (folder / "latest.json").write_text(json.dumps({"update": update}))

    def load_checkpoint(self, state, folder):
        update = json.loads((folder / "latest.json").read_text())["update"]
        state.model.load_state_dict(torch.load(folder / f"{update}-weights.pt", weights_only=True))
        moments, schedule = torch.load(folder / f"{update}-training.pt", weights_only=True)
        state.optimizer.load_state_dict(moments)
        state.scheduler.load_state_dict(schedule)
        return state

    def sync_weights(self, state, engine):
        """From the state dict, whose names are the engine's."""
        weights = state.model.state_dict()
        names = [name for name, _ in state.model.named_parameters(remove_duplicate=False)]
        engine.load_weights((name, weights[name].clone()) for name in names)
        engine.reset_prefix_cache()
        engine.version += 1
