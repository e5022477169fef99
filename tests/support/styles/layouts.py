"""Ranks by hand: contiguous parts of rows without their last token, gradients averaged over the world, and logsumexps.

Each rank has a gradient buffer of its own and runs its own forward passes. The world's average divides by all ranks, so
every rank multiplies its loss by their number, and tensor-parallel ranks, which have equal losses, are averaged away.
"""

from itertools import product

import torch

from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.records.layouts import RowShard


class ContiguousRanks(Adapter):
    """Trains with the loss of each token, which a subclass gives in `token_losses`, divided by `divisor`."""

    def shard_rows(self, batch, layout, rank):
        return [self._part(batch, row, layout.context_parallel, rank) for row in range(len(batch.rewards))]

    def _part(self, batch, row, ranks, rank):
        attended = batch.attention_mask[row]
        ids, positions = batch.input_ids[row][attended], batch.position_ids[row][attended]
        prompt = len(ids) - int(attended[int(batch.completion_starts[row]) :].sum())
        own = torch.arange(len(ids) - 1).tensor_split(ranks)[rank]
        slot = own + 1 - prompt
        is_completion = slot >= 0
        slot = slot.clamp(min=0)
        return RowShard(
            input_ids=ids[own],
            attention_mask=torch.ones(len(own), dtype=torch.int),
            position_ids=positions[own].int(),
            labels=torch.where(is_completion & batch.completion_mask[row, slot], ids[own + 1], -100),
            loss_mask=is_completion & batch.completion_mask[row, slot],
            old_logprobs=batch.old_logprobs[row, slot],
        )

    def replayed_routes(self, rows, layout):
        chosen = rows[0].routes.shape[-1]
        tokens = []
        for row in rows:
            for position in range(len(row.token_ids)):
                routers = iter(row.routes[position] if position < len(row.routes) else [])
                nothing = torch.zeros(chosen, dtype=torch.long)
                tokens.append(torch.stack([next(routers, nothing) if has else nothing for has in layout.is_routed]))
        while len(tokens) % layout.multiple:
            tokens.append(torch.zeros_like(tokens[0]))
        return torch.stack(tokens)

    def gathered_logprobs(self, shards, batch, layout):
        """For scoring only: nothing is trained through it."""
        result = torch.zeros(batch.completion_ids.shape)
        for row, parts in enumerate(zip(*shards, strict=True)):
            whole = torch.cat(parts).detach()
            length = int(batch.attention_mask[row, int(batch.completion_starts[row]) :].sum())
            result[row, :length] = whole[len(whole) - length :]
        return result

    def vocab_parallel_logprobs(self, shards, token_ids, temperature):
        width = shards.logits[0].shape[-1]
        if shards.vocab_size != width * len(shards.logits):
            raise NotProvided("the vocabulary is not padded")
        scores, totals = torch.zeros(token_ids.shape), []
        for rank, logits in enumerate(shards.logits):
            scaled = logits.float() / temperature
            totals.append(scaled.logsumexp(-1))
            rows = (token_ids // width == rank).nonzero(as_tuple=True)
            scores = scores.index_put(rows, scaled[(*rows, token_ids[rows] % width)])
        return scores - torch.stack(totals).logsumexp(0)

    def sharded_update(self, state, batch, layout):
        if len(batch.rewards) % (layout.data_parallel * layout.micro_batches):
            raise NotProvided("rows have to divide evenly")
        model, parameters = state.model, [each for each in state.model.parameters() if each.requires_grad]
        advantages = self.advantages(batch.rewards, batch.group_ids)
        world = layout.data_parallel * layout.context_parallel * layout.tensor_parallel
        total = [torch.zeros_like(each) for each in parameters]
        logged = {"loss": 0.0, "ratio_mean": 0.0, "tokens": 0.0, "reward": 0.0}
        modes = {module: module.training for module in model.modules()}
        model.eval()
        # Rows are dealt out like cards.
        for data, context, tensor in product(
            range(layout.data_parallel), range(layout.context_parallel), range(layout.tensor_parallel)
        ):
            state.optimizer.zero_grad(set_to_none=True)
            mine = torch.arange(len(batch.rewards))[data :: layout.data_parallel]
            for rows in mine.chunk(layout.micro_batches):
                keep = batch.completion_mask[rows] & self._own(batch, rows, layout.context_parallel, context)
                losses, ratio = self.token_losses(model, batch, rows, advantages[rows])
                loss = losses.masked_fill(~keep, 0).sum() / self.divisor(batch)
                # Of the ranks that share rows and weights, the first logs.
                if tensor == 0:
                    logged["loss"] += loss.item()
                    logged["ratio_mean"] += ratio[keep].double().sum().item() / int(batch.completion_mask.sum())
                if tensor == context == 0:
                    logged["tokens"] += int(batch.attention_mask[rows].sum())
                    logged["reward"] += batch.rewards[rows].sum().item() / len(batch.rewards)
                (loss * layout.data_parallel * layout.context_parallel).backward()
            for sum_of_ranks, parameter in zip(total, parameters, strict=True):
                sum_of_ranks += 0 if parameter.grad is None else parameter.grad
        for module, training in modes.items():
            module.training = training
        for sum_of_ranks, parameter in zip(total, parameters, strict=True):
            parameter.grad = sum_of_ranks / world
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.conventions.max_grad_norm)
        rate = state.scheduler.get_last_lr()[0]
        state.optimizer.step()
        state.scheduler.step()
        return {**logged, "grad_norm": norm.item(), "lr": rate}

    def _own(self, batch, rows, ranks, rank):
        """[rows, T] whether the position before each token is this rank's."""
        own = torch.zeros(len(rows), batch.completion_ids.shape[1], dtype=torch.bool)
        for place, row in enumerate(rows.tolist()):
            length = int(batch.attention_mask[row].sum())
            prompt = length - int(batch.attention_mask[row, int(batch.completion_starts[row]) :].sum())
            for position in torch.arange(length - 1).tensor_split(ranks)[rank].tolist():
                if position + 1 >= prompt:
                    own[place, position + 1 - prompt] = True
        return own
