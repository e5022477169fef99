"""RLOO: the baseline is the mean of the others, the KL is in the reward, nothing is clipped, whole sequences count.

The policy gradient is of the summed logprob of each completion. Written as plain REINFORCE over rows of unequal length:
every sequence is scored alone, without padding, and gradients pile up row by row.
"""

import copy
import math
import threading

import torch

from rlcanary.contract.adapter import Adapter, NotProvided, TrainState
from rlcanary.contract.batch import CollatedBatch, Completion, Group, LossOutput
from rlcanary.contract.conventions import Conventions
from styles.buffers import Stack
from styles.run_starts import RunStarts


class Rloo(RunStarts, Stack, Adapter):
    name = "rloo-by-hand"
    conventions = Conventions(
        advantage_baseline="leave_one_out",
        advantage_scale="none",
        clip_low=None,
        clip_high=None,
        aggregation="sequence_sum",
        kl_estimator="k1",
        kl_coef=0.05,
        kl_placement="reward",
        temperature=0.9,
        buffer_order="newest_first",
        sync_buffers=True,
        decayed="matrices",
    )

    # One sequence at a time.

    def _score(self, model, ids, start, temperature):
        """[S] ids -> logprobs and entropies of those from `start` on."""
        logits = model(input_ids=ids[None]).logits[0, start - 1 : -1].float() / temperature
        everything = torch.log_softmax(logits, dim=-1)
        return everything[torch.arange(len(ids) - start), ids[start:]], -(everything.exp() * everything).sum(dim=-1)

    def _sequence(self, batch, row):
        """The row's own ids and where its completion starts among them."""
        attended = batch.attention_mask[row]
        return batch.input_ids[row][attended], int(attended[: batch.completion_starts[row]].sum())

    def completion_logprobs(self, model, batch, temperature):
        result = torch.full(batch.completion_ids.shape, math.nan)
        for row in range(len(result)):
            ids, start = self._sequence(batch, row)
            result[row, : len(ids) - start] = self._score(model, ids, start, temperature)[0]
        return result

    def token_logprobs(self, logits, token_ids, temperature):
        # Softmax in float32 with the row's maximum taken out.
        scaled = logits.float() / temperature
        scaled = scaled - scaled.amax(dim=-1, keepdim=True).detach()
        return scaled.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - scaled.exp().sum(dim=-1).log()

    # Rewards.

    def advantages(self, rewards, group_ids):
        if rewards.isnan().any() or rewards.isinf().any():
            raise ValueError("every completion needs a finite reward")
        values, groups = rewards.tolist(), group_ids.tolist()
        result = []
        for place, reward in enumerate(values):
            others = [
                values[other] for other in range(len(values)) if groups[other] == groups[place] and other != place
            ]
            result.append(reward - math.fsum(others) / len(others) if others else 0.0)
        return torch.tensor(result, dtype=rewards.dtype)

    def keep_group(self, rewards):
        return len(set(rewards.tolist())) > 1

    def kl(self, logprobs, ref_logprobs):
        return logprobs - ref_logprobs

    def importance_weights(self, trainer_logprobs, sampler_logprobs, mask):
        return torch.where(mask, 1.0, 0.0)

    # Loss.

    def policy_loss(self, batch):
        return self._loss(batch, [range(len(batch.mask))])

    def accumulated_loss(self, batch, n_micro):
        """Micro-batches of about as many tokens each, so of unequal numbers of rows."""
        target = int(batch.mask.sum()) / n_micro
        pieces, taken = [[] for _ in range(n_micro)], 0
        for row, tokens in enumerate(batch.mask.sum(dim=1).tolist()):
            pieces[min(n_micro - 1, int(taken / max(target, 1)))].append(row)
            taken += tokens
        return self._loss(batch, pieces)

    def sharded_loss(self, batch, n_ranks):
        return self._loss(batch, [range(rank, len(batch.mask), n_ranks) for rank in range(n_ranks)])

    def _loss(self, batch, pieces):
        rows = batch.global_sequences or len(batch.mask)
        total = 0 * batch.logprobs.masked_fill(~batch.mask, 0).sum()
        ratios = []
        for piece in pieces:
            for row in piece:
                kept = batch.mask[row]
                ratio = (batch.logprobs[row][kept] - batch.old_logprobs[row][kept]).exp()
                advantage = batch.advantages[row] if batch.advantages.ndim == 1 else batch.advantages[row][kept]
                total = total - (ratio * advantage).sum()
                ratios.append(ratio.detach())
        ratios = torch.cat(ratios)
        logged = {"ratio_mean": ratios.double().mean(), "clip_fraction": 0.0}
        if len(ratios):
            logged |= {"ratio_min": ratios.min(), "ratio_max": ratios.max()}
        else:
            del logged["clip_fraction"]
        return LossOutput(total / rows, {name: float(value) for name, value in logged.items()})

    # Batches.

    def make_batch(self, groups, pad_token_id):
        sequences, starts, masks, logprobs, rewards, members, versions, names = ([] for _ in range(8))
        for member, group in enumerate(groups):
            for completion, reward in zip(group.completions, group.rewards, strict=True):
                sequences.append(torch.tensor([*group.prompt_ids, *completion.token_ids]))
                starts.append(len(group.prompt_ids))
                length = len(completion.token_ids)
                drawn = torch.ones(length, dtype=torch.bool)
                masks.append(drawn if completion.sampled is None else torch.tensor(list(completion.sampled)))
                missing = torch.full((length,), math.nan)
                logprobs.append(missing if completion.logprobs is None else torch.tensor(list(completion.logprobs)))
                rewards.append(reward)
                members.append(member)
                versions.append(group.policy_version)
                names.append(group.item_id)
        fill = torch.nn.utils.rnn.pad_sequence
        has_logprobs = any(not values.isnan().all() for values in logprobs)
        return CollatedBatch(
            input_ids=fill(sequences, True, pad_token_id),
            attention_mask=fill([torch.ones(len(ids), dtype=torch.bool) for ids in sequences], True, False),
            position_ids=fill([torch.arange(len(ids)) for ids in sequences], True, 0),
            completion_starts=torch.tensor(starts),
            completion_ids=fill(
                [ids[start:] for ids, start in zip(sequences, starts, strict=True)], True, pad_token_id
            ),
            completion_mask=fill(masks, True, False),
            rewards=torch.tensor(rewards, dtype=torch.float32),
            group_ids=torch.tensor(members),
            old_logprobs=fill(logprobs, True, math.nan) if has_logprobs else None,
            policy_versions=torch.tensor(versions),
            item_ids=names,
        )

    def rollout(self, engine, items, sampling):
        """A thread per prompt, in the engine's blocking mode; the first failure is raised."""
        groups, failures = [None] * len(items), []

        def work(place, item):
            version = engine.version
            try:
                (completions,) = engine.generate([list(item.prompt_ids)], dict(sampling))
                rewards = [item.reward(completion.text) for completion in completions]
            except Exception as failure:  # noqa: BLE001 - raised again by the thread that waits
                failures.append(failure)
                return
            rewards = [math.nan if reward is None else reward for reward in rewards]
            groups[place] = Group(item.prompt_ids, completions, rewards, item_id=item.id, policy_version=version)

        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(items)]
        for thread in threads:
            thread.start()
            # The scripted engine is not made for threads; a real one takes all of them at once.
            thread.join()
        if failures:
            raise failures[0]
        return groups

    def generate(self, engine, prompts, sampling):
        answers = engine.generate(prompts, sampling)
        return [[Completion(each.token_ids, each.logprobs, each.finish_reason) for each in group] for group in answers]

    # Training.

    def new_state(self, model, ref_model, learning_rate):
        optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, betas=(0.9, 0.99), amsgrad=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.999)
        return TrainState(model, optimizer, schedule, ref_model)

    def train_step(self, state, batch):
        if batch.old_logprobs is None:
            raise NotProvided("the sampler has to give logprobs")
        temperature, coefficient = self.conventions.temperature, self.conventions.kl_coef
        rows, modes = range(len(batch.rewards)), [(module, module.training) for module in state.model.modules()]
        state.model.eval()
        rewards = batch.rewards.clone()
        if coefficient and (batch.ref_logprobs is not None or state.ref_model is not None):
            for row in rows:
                kept = batch.completion_mask[row]
                if batch.ref_logprobs is not None:
                    reference = batch.ref_logprobs[row][kept]
                else:
                    ids, start = self._sequence(batch, row)
                    with torch.no_grad():
                        reference = self._score(state.ref_model, ids, start, temperature)[0]
                    reference = reference[kept[: len(reference)]]
                rewards[row] -= coefficient * self.kl(batch.old_logprobs[row][kept], reference).sum()
        advantages = self.advantages(rewards, batch.group_ids)
        state.optimizer.zero_grad()
        drawn, spread = [], []
        for row in rows:
            ids, start = self._sequence(batch, row)
            logprobs, entropy = self._score(state.model, ids, start, temperature)
            kept = batch.completion_mask[row][: len(logprobs)]
            ratio = (logprobs - batch.old_logprobs[row][: len(logprobs)])[kept].exp()
            (-advantages[row] * ratio.sum() / len(rows)).backward()
            drawn.append(ratio.detach())
            spread.append(entropy.detach()[kept])
        for module, mode in modes:
            module.training = mode
        squares = [
            weight.grad.double().square().sum() for weight in state.model.parameters() if weight.grad is not None
        ]
        rate = state.optimizer.param_groups[0]["lr"]
        state.optimizer.step()
        state.scheduler.step()
        drawn = torch.cat(drawn)
        return {
            "lr": rate,
            "grad_norm": float(sum(squares) ** 0.5),
            "reward": float(batch.rewards.mean()),
            "tokens": int(batch.attention_mask.sum()),
            "ratio_mean": float(drawn.mean()),
            "ratio_min": float(drawn.min()),
            "ratio_max": float(drawn.max()),
            "entropy": float(torch.cat(spread).mean()),
        }

    def save_checkpoint(self, state, folder):
        """The state as a whole, one file that each update replaces."""
        torch.save(
            [state.model.state_dict(), state.optimizer.state_dict(), state.scheduler.state_dict()], folder / "run"
        )

    def load_checkpoint(self, state, folder):
        """Everything is loaded into a copy."""
        weights, optimizer, schedule = torch.load(folder / "run", weights_only=True)
        resumed = copy.deepcopy(state)
        resumed.model.load_state_dict(weights)
        resumed.optimizer.load_state_dict(optimizer)
        resumed.scheduler.load_state_dict(schedule)
        return resumed

    def sync_weights(self, state, engine):
        """The state dict, one tensor at a time, each under its own name."""
        for name, weight in state.model.state_dict().items():
            loaded = engine.load_weights([(name, weight)])
            if loaded != {name}:
                raise RuntimeError(f"the engine did not take {name}")
        engine.reset_prefix_cache()
        engine.version += 1
