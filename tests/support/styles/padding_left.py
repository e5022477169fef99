"""GRPO with prompts padded on the left, as generation with transformers leaves them: completions start in one column.

A KL to the reference in the loss, chat templates written turn by turn, and means of the sequences that have a token.
"""

import copy
import json
import math
from itertools import groupby

import torch

from rlcanary.contract.adapter import Adapter, NotProvided, TrainState
from rlcanary.contract.batch import CollatedBatch, Group, LossOutput
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.engine import InProcessEngine


def _rewritten(content):
    thoughts, end, answer = content.strip().rpartition("</think>")
    if not end:
        return answer
    return f"<think>\n{thoughts.removeprefix('<think>').strip()}\n</think>\n\n{answer.strip()}"


def _merged_tools(messages):
    """Write the answers of all tools of a turn as one turn of the user."""
    turns = []
    for role, of_role in groupby(messages, key=lambda message: message["role"]):
        if role == "tool":
            of_role = [{"role": "user", "content": "".join(f"<tool>{each['content']}</tool>" for each in of_role)}]
        turns += of_role
    return turns


class PaddingLeft(Adapter):
    name = "padding-left-by-hand"

    def __init__(self, kl_coef=0.04, temperature=1.0):
        self.beta, self.temperature = kl_coef, temperature
        self.conventions = Conventions(
            kl_coef=kl_coef,
            temperature=temperature,
            advantage_ddof=1,
            advantage_eps=1e-4,
            aggregation="sequence_mean_nonempty",
            clip_high=0.3,
        )

    def configured(self, **changes):
        known = {"kl_coef": self.beta, "temperature": self.temperature}
        wanted = {name: value for name, value in changes.items() if getattr(self.conventions, name) != value}
        if unknown := sorted(set(wanted) - set(known)):
            raise NotProvided(f"{', '.join(unknown)} cannot be set")
        return type(self)(**known | wanted)

    # Forward.

    def token_logprobs(self, logits, token_ids, temperature):
        # Row by row, so that no second copy of all logits is alive.
        rows = []
        for row_logits, ids in zip(logits.unbind(0), token_ids.unbind(0), strict=True):
            row_logits = row_logits.float() / temperature
            rows.append(row_logits.gather(1, ids.view(-1, 1)).view(-1) - torch.logsumexp(row_logits, dim=1))
        return torch.stack(rows)

    def entropy(self, logits):
        logp = torch.log_softmax(logits.float(), dim=-1)
        return -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(dim=-1)

    def completion_logprobs(self, model, batch, temperature):
        return self._forward(model, self._left(batch), temperature)[0]

    def _left(self, batch):
        """Any batch with its prompts against the right edge and its completions behind it: ids, mask and T."""
        width = batch.completion_ids.shape[1]
        starts = batch.completion_starts.tolist()
        prompts = [batch.input_ids[row, :start][batch.attention_mask[row, :start]] for row, start in enumerate(starts)]
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest + width, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest + width, dtype=torch.long)
        for row, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
            behind = int(batch.attention_mask[row, start:].sum())
            ids[row, longest - len(prompt) : longest] = prompt
            ids[row, longest:] = batch.completion_ids[row]
            mask[row, longest - len(prompt) : longest + behind] = 1
        return ids, mask, width

    def _forward(self, model, left, temperature):
        ids, mask, width = left
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=width + 1).logits
        logits = logits[:, :-1] / temperature
        return self.token_logprobs(logits, ids[:, -width:], 1.0), self.entropy(logits)

    # Objective.

    def advantages(self, rewards, group_ids):
        if torch.isnan(rewards).any() or torch.isinf(rewards).any():
            raise ValueError("rewards have to be numbers")
        order = group_ids.argsort(stable=True)
        _, counts = group_ids[order].unique_consecutive(return_counts=True)
        result = torch.empty(len(rewards), dtype=torch.float64)
        for rows in order.split(counts.tolist()):
            group = rewards[rows].double()
            centred = group - group.mean()
            spread = math.sqrt(float(centred.square().sum()) / (len(group) - 1)) if len(group) > 1 else 0.0
            result[rows] = centred / (spread + 1e-4)
        return result.to(rewards.dtype)

    def kl(self, logprobs, ref_logprobs):
        step = ref_logprobs - logprobs
        return step.exp() - step - 1

    def policy_loss(self, batch):
        return self._combined([batch])

    def accumulated_loss(self, batch, n_micro):
        return self._combined([batch.rows(rows) for rows in torch.arange(len(batch.mask)).tensor_split(n_micro)])

    def sharded_loss(self, batch, n_ranks):
        return self._combined([batch.rows(torch.arange(rank, len(batch.mask), n_ranks)) for rank in range(n_ranks)])

    def _combined(self, pieces):
        rows = pieces[0].global_sequences
        if rows is None:
            rows = sum(int(piece.mask.any(dim=1).sum()) for piece in pieces)
        losses, columns = zip(*map(self._piece, pieces), strict=True)
        metrics = {}
        for name in columns[0]:
            values = torch.cat([column[name] for column in columns]).double()
            if len(values):
                metrics[name] = float(values.mean())
                if name == "ratio_mean":
                    metrics |= {"ratio_min": float(values.min()), "ratio_max": float(values.max())}
        return LossOutput(sum(losses) / max(rows, 1), metrics)

    def _piece(self, batch):
        """The sum of the rows' losses, and per metric the values at its tokens."""
        keep = batch.mask
        logprobs, old = batch.logprobs.masked_fill(~keep, 0.0), batch.old_logprobs.masked_fill(~keep, 0.0)
        advantages = batch.advantages if batch.advantages.dim() == 2 else batch.advantages.unsqueeze(1)
        advantages = advantages.expand(keep.shape)
        ratio = torch.exp(logprobs - old)
        low, high = 1 - self.conventions.clip_low, 1 + self.conventions.clip_high
        # The bound that is in force depends on the sign of the advantage.
        held = torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(min=low))
        losses = -held * advantages
        metrics = {"ratio_mean": ratio, "clip_fraction": ((held != ratio) & (advantages != 0)).float()}
        if batch.ref_logprobs is not None:
            metrics["kl"] = self.kl(logprobs, batch.ref_logprobs.masked_fill(~keep, 0.0))
            if self.beta:
                losses = losses + self.beta * metrics["kl"]
        elif self.beta:
            raise NotProvided("beta needs a reference")
        if batch.entropy is not None:
            metrics["entropy"] = batch.entropy
        if batch.sampler_logprobs is not None:
            metrics["mult_prob_error"] = (batch.old_logprobs - batch.sampler_logprobs).abs().exp()
        lengths = keep.sum(dim=1).clamp(min=1)
        total = (losses.masked_fill(~keep, 0.0).sum(dim=1) / lengths).sum()
        return total, {name: value.detach()[keep] for name, value in metrics.items()}

    # Data.

    def make_batch(self, groups, pad_token_id):
        rows = [(number, group, each) for number, group in enumerate(groups) for each in group.completions]
        before = max(len(group.prompt_ids) for group in groups)
        behind = max(len(each.token_ids) for _, _, each in rows)

        def right(values, filling):
            return list(values) + [filling] * (behind - len(values))

        def line(group, each):
            return (
                [pad_token_id] * (before - len(group.prompt_ids))
                + list(group.prompt_ids)
                + right(each.token_ids, pad_token_id)
            )

        def mask(group, each):
            return (
                [False] * (before - len(group.prompt_ids))
                + [True] * len(group.prompt_ids)
                + right([True] * len(each.token_ids), False)
            )

        attention = torch.tensor([mask(group, each) for _, group, each in rows])
        logprobs = [each.logprobs or [math.nan] * len(each.token_ids) for _, _, each in rows]
        drawn = [[True] * len(each.token_ids) if each.sampled is None else each.sampled for _, _, each in rows]
        return CollatedBatch(
            input_ids=torch.tensor([line(group, each) for _, group, each in rows]),
            attention_mask=attention,
            position_ids=((attention.long().cumsum(dim=1) - 1) * attention).clamp(min=0),
            completion_starts=torch.full((len(rows),), before),
            completion_ids=torch.tensor([right(each.token_ids, pad_token_id) for _, _, each in rows]),
            completion_mask=torch.tensor([right(each, False) for each in drawn]),
            rewards=torch.tensor([float(reward) for group in groups for reward in group.rewards]),
            group_ids=torch.tensor([number for number, _, _ in rows]),
            old_logprobs=torch.tensor([right(each, math.nan) for each in logprobs])
            if any(each.logprobs is not None for _, _, each in rows)
            else None,
            policy_versions=torch.tensor([group.policy_version for _, group, _ in rows]),
            item_ids=[group.item_id for _, group, _ in rows],
        )

    def render(self, messages, tokenizer, tools=None):
        """Turn by turn in the template's own words, so that what was sampled is never encoded again."""
        ids, trained = [tokenizer.bos_token_id], [False]

        def add(new, is_trained):
            ids.extend(new)
            trained.extend([is_trained] * len(new))

        def encode(text):
            return tokenizer.encode(text, add_special_tokens=False)

        if tools:
            schemas = "\n".join(json.dumps(tool) for tool in tools)
            add([*encode(f"<|start|>tools\n{schemas}"), tokenizer.eos_token_id, *encode("\n")], False)
        if "</think>" in tokenizer.chat_template:
            messages = [{**message, "content": _rewritten(message["content"])} for message in messages]
        for message in _merged_tools(messages) if "<tool>" in tokenizer.chat_template else messages:
            add(encode(f"<|start|>{message['role']}\n"), False)
            sampled = bool(message.get("sampled"))
            content = list(message["token_ids"]) if sampled and "token_ids" in message else encode(message["content"])
            was_ended = not (sampled and "token_ids" in message)
            add(content, sampled)
            if not content or content[-1] != tokenizer.eos_token_id or was_ended:
                add([tokenizer.eos_token_id], sampled and was_ended)
            add(encode("\n"), False)
        return ids, trained

    def rollout(self, engine, items, sampling):
        """One request per prompt, one after the other."""
        groups = []
        for item in items:
            version = engine.version
            ((*completions,),) = engine.generate([item.prompt_ids], sampling)
            rewards = [item.reward(each.text) for each in completions]
            rewards = [math.nan if reward is None else float(reward) for reward in rewards]
            groups.append(Group(item.prompt_ids, completions, rewards, item_id=item.id, policy_version=version))
        return groups

    # Training.

    def new_engine(self, model):
        return InProcessEngine(model, decode=lambda ids: "/".join(map(str, ids)))

    def new_state(self, model, ref_model, learning_rate):
        reference = None if ref_model is None else copy.deepcopy(ref_model).eval().requires_grad_(False)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=learning_rate)
        return TrainState(
            model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k / 50)), reference
        )

    def train_step(self, state, batch):
        if batch.old_logprobs is None:
            raise NotProvided("the sampler's logprobs are needed")
        left, training = self._left(batch), [module.training for module in state.model.modules()]
        state.model.train(False)
        logprobs, entropy = self._forward(state.model, left, self.temperature)
        reference = batch.ref_logprobs
        if reference is None and state.ref_model is not None:
            with torch.inference_mode():
                reference = self._forward(state.ref_model, left, self.temperature)[0]
            reference = reference.clone()
        seen = copy.copy(batch)
        seen.logprobs, seen.mask, seen.entropy, seen.ref_logprobs = logprobs, batch.completion_mask, entropy, reference
        seen.advantages = self.advantages(batch.rewards, batch.group_ids)
        seen.sampler_logprobs, seen.global_sequences = batch.old_logprobs, None
        output = self._combined([seen])
        state.optimizer.zero_grad()
        output.loss.backward()
        for module, was in zip(state.model.modules(), training, strict=True):
            module.training = was
        gradients = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        rate = state.scheduler.get_last_lr()[-1]
        state.optimizer.step()
        state.scheduler.step()
        return {**output.metrics, "grad_norm": float(norm), "lr": rate, "reward": float(batch.rewards.double().mean())}

    def evaluate(self, state):
        prompts = [item.prompt_ids for item in state.eval_items]
        answers = self.new_engine(state.model).generate(prompts, {"temperature": 0.0, "max_new_tokens": 5})
        rewards = [item.reward(answer.text) for item, (answer,) in zip(state.eval_items, answers, strict=True)]
        return {"reward": math.fsum(rewards) / max(len(rewards), 1)}

    def sync_weights(self, state, engine):
        with torch.no_grad():
            engine.load_weights([(name, weight.detach().clone()) for name, weight in state.model.named_parameters()])
        engine.reset_prefix_cache()
        engine.version += 1

    def generate(self, engine, prompts, sampling):
        return engine.generate(prompts, sampling)
