"""How rlcanary calls the published functions of rlvr-experiments, which have to be on PYTHONPATH.

Written for its commit c364be0. The conventions are what its docstrings and its entry points say.
"""

import contextlib
import functools
import io
from types import SimpleNamespace
from unittest.mock import patch

import torch
from rlvr_experiments import losses
from rlvr_experiments.algorithms import grpo
from rlvr_experiments.ops import compute_logprobs

from rlcanary import Adapter, CollatedBatch, Conventions, LossOutput, NotProvided
from rlcanary.adapters.batches import kl_of_each_token, prompts_of, tokens_of_completions


@functools.cache
def verifier(kind, format):
    """The verifier that the datasets of this kind name."""
    from rlvr_experiments.verifiers.gsm8k import GSM8KVerifier
    from rlvr_experiments.verifiers.math import MathVerifier

    if kind not in ("number", "math"):
        raise NotProvided(f"no verifier for answers of kind {kind}")
    if (kind, format) == ("number", "hash"):
        return GSM8KVerifier()
    if format == "boxed" or (kind, format) == ("number", "tag"):
        return MathVerifier(max_workers=1)
    raise NotProvided(f"no verifier reads answers of kind {kind} in the format {format}")


def sizes_of(group_ids):
    """The lengths of the groups, which have to lie one after the other."""
    sizes = group_ids.unique_consecutive(return_counts=True)[1].tolist()
    if len(sizes) != len(group_ids.unique()):
        raise NotProvided("groups have to be contiguous")
    return sizes


class Canary(Adapter):
    """GRPOLoss with compute_grpo_advantages."""

    name = "rlvr-experiments"
    conventions = Conventions(
        advantage_ddof=0,
        advantage_eps=1e-6,
        advantage_eps_mode="clamp",
        singleton_group="zero",
        aggregation="sequence_mean",
        kl_estimator="k3",
        kl_coef=0.001,
        clip_low=0.2,
        clip_high=0.2,
        logprobs_upcast=False,
        old_logprobs="sampler",
    )

    def configured(self, **changes):
        known = {"kl_coef", "temperature"}
        new = {name: value for name, value in changes.items() if getattr(self.conventions, name) != value}
        if set(new) - known:
            raise NotProvided(f"no setting for {', '.join(sorted(set(new) - known))}")
        other = type(self)()
        other.conventions = self.conventions.replace(**new)
        return other

    def token_logprobs(self, logits, token_ids, temperature):
        return compute_logprobs(logits, token_ids, temperature=temperature, align=False)[0]

    def entropy(self, logits):
        return compute_logprobs(logits, torch.zeros(logits.shape[:2], dtype=torch.long), align=False)[1]

    def completion_logprobs(self, model, batch, temperature):
        prompts = prompts_of(batch)
        starts = torch.tensor([len(prompt) for prompt in prompts])
        lengths = tokens_of_completions(batch).sum(dim=1).tolist()
        rows = [
            torch.cat([prompt, ids[:length]])
            for prompt, ids, length in zip(prompts, batch.completion_ids, lengths, strict=True)
        ]
        width = int(starts.max()) + batch.completion_ids.shape[1]
        input_ids = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])
        logits = model(input_ids=input_ids).logits
        return compute_logprobs(logits, batch.completion_ids, temperature=temperature, prompt_lens=starts)[0]

    def make_batch(self, groups, pad_token_id):
        samples = [self._sample(group, pad_token_id) for group in groups]
        batch = self._batch(samples, pad_token_id)
        lengths_B = torch.tensor([length for sample in samples for length in sample.rollout.completion_lens])
        places_S = torch.arange(batch.input_ids.shape[1])
        attention_BS = places_S < (batch.prompt_lens + lengths_B).unsqueeze(1)
        return CollatedBatch(
            input_ids=batch.input_ids,
            attention_mask=attention_BS,
            position_ids=places_S * attention_BS,
            completion_starts=batch.prompt_lens,
            completion_ids=batch.completion_ids,
            completion_mask=batch.mask.bool(),
            rewards=batch.rewards,
            group_ids=torch.tensor([number for number, group in enumerate(groups) for _ in group.rewards]),
            old_logprobs=batch.logprobs,
            ref_logprobs=batch.ref_logprobs,
            policy_versions=torch.tensor([sample.trainer_version for sample in samples for _ in sample.rewards]),
            item_ids=[group.item_id for group in groups for _ in group.rewards],
        )

    def advantages(self, rewards, group_ids):
        return losses.compute_grpo_advantages(rewards, group_sizes=sizes_of(group_ids))

    def kl(self, logprobs, ref_logprobs):
        alone = self.configured(kl_coef=1.0)
        return kl_of_each_token(lambda batch: alone._loss(batch).loss, logprobs, ref_logprobs)

    def policy_loss(self, batch):
        return self._loss(batch)

    def accumulated_loss(self, batch, n_micro):
        if len(batch.mask) % n_micro:
            raise NotProvided("micro-batches have to be of equal size")
        return self._forward_backward(batch, len(batch.mask) // n_micro, 0, 1)

    def sharded_loss(self, batch, n_ranks):
        """What DDP makes of the ranks: the mean of their gradients. The metrics are those of rank 0."""
        if len(batch.mask) % n_ranks:
            raise NotProvided("shards have to be of equal size")
        outputs = [self._forward_backward(batch, None, rank, n_ranks) for rank in range(n_ranks)]
        return LossOutput(torch.stack([output.loss for output in outputs]).mean(), outputs[0].metrics)

    def verify(self, answer):
        return verifier(answer.kind, answer.format).verify(answer.text, answer.reference) == 1.0

    def _module(self):
        return losses.GRPOLoss(beta=self.conventions.kl_coef, eps=self.conventions.clip_high)

    def _arguments(self, batch):
        """The loss's arguments behind the logits, as entrypoints/train_grpo_sft.py passes them."""
        ids = torch.zeros(batch.mask.shape, dtype=torch.long)
        reference = batch.old_logprobs if batch.ref_logprobs is None else batch.ref_logprobs
        return (ids, reference, batch.old_logprobs, batch.advantages), {"padding_mask": batch.mask}

    def _metrics(self, debug):
        """Return what rlcanary has a name for. Its clip fraction counts no ratio beyond a bound that does not hold it."""
        return {"kl": debug["kl_mean"], "ratio_max": debug["ratio_max"]}

    def _loss(self, batch):
        """Run the loss on logprobs that are given, in the place of those that it computes from logits."""
        declined(batch)
        module = self._module()
        positional, named = self._arguments(batch)
        with scored(batch.entropy), quiet():
            loss = module(batch.logprobs, *positional, **named)
        return LossOutput(loss, self._metrics(module.get_debug_metrics()))

    def _forward_backward(self, batch, micro_batch_size, rank, n_ranks):
        """Run the trainer's own loop over the micro-batches of a rank. The model looks up the logprobs of its rows."""
        from rlvr_experiments.titan_actor import TitanModelRank

        declined(batch)
        own = TitanModelRank.__ray_metadata__.modified_class
        logprobs_BT = batch.logprobs.detach().requires_grad_()
        model = SimpleNamespace(
            forward=lambda rows_B: logprobs_BT[rows_B],
            device="cpu",
            train_context_mgr=lambda _: contextlib.nullcontext(),
            parallel_dims=SimpleNamespace(
                dp_replicate=n_ranks,
                world_mesh=SimpleNamespace(mesh_dim_names=["dp_replicate"], get_local_rank=lambda _: rank),
            ),
        )
        actor = SimpleNamespace(model=model, rank=rank)
        actor._get_dp_shard = functools.partial(own._get_dp_shard, actor)
        positional, named = self._arguments(batch)
        rows_B = torch.arange(len(batch.mask))
        with scored(None), quiet():
            value, debug = own.forward_backward(
                actor, self._module(), rows_B, positional, named, micro_batch_size=micro_batch_size
            )
        # A loss with this value and the gradient that the loop has left.
        moved = (logprobs_BT.grad * (batch.logprobs - batch.logprobs.detach())).sum()
        return LossOutput(value + moved, self._metrics(debug))

    def _batch(self, samples, pad_token_id):
        with quiet():
            return grpo.make_batch(samples, pad_token_id)[0]

    def _sample(self, group, pad_token_id):
        rows = [list(completion.token_ids) for completion in group.completions]
        prompt = list(group.prompt_ids)
        if any(completion.sampled is not None for completion in group.completions):
            raise NotProvided("single answers, without tokens of tools")
        if any(completion.logprobs is None for completion in group.completions):
            raise NotProvided("the engine always returns logprobs")
        width = max(map(len, rows))

        def padded(values, value, dtype, width):
            return torch.tensor([[*each, *[value] * (width - len(each))] for each in values], dtype=dtype)

        rollout = grpo.RolloutSample(
            padded([prompt + row for row in rows], pad_token_id, torch.long, len(prompt) + width),
            padded(rows, pad_token_id, torch.long, width),
            padded([completion.logprobs for completion in group.completions], 0.0, torch.float32, width),
            len(prompt),
            [completion.finish_reason for completion in group.completions],
            list(map(len, rows)),
        )
        reference = group.ref_logprobs and padded(group.ref_logprobs, 0.0, torch.float32, width)
        return grpo.TrainSample(rollout, list(group.rewards), reference, str(group.item_id), group.policy_version)


class Dapo(Canary):
    """DAPOLoss, which gets no group sizes from the entry point."""

    name = "rlvr-experiments, DAPO"
    conventions = Canary.conventions.replace(aggregation="group_token_mean", clip_high=0.28, kl_coef=0.0)

    def _module(self):
        return losses.DAPOLoss(self.conventions.clip_low, self.conventions.clip_high, self.conventions.kl_coef)

    def _arguments(self, batch):
        (ids, reference, old, advantages), named = super()._arguments(batch)
        return (ids, old, advantages), named | {"ref_logprobs": reference}

    def _metrics(self, debug):
        return {"ratio_max": debug["ratio_max"]}  # without a KL it logs 0


class DapoOverTokens(Dapo):
    """The same, declared as it is run: a mean over tokens."""

    name = "rlvr-experiments, DAPO over tokens"
    conventions = Dapo.conventions.replace(aggregation="token_mean")


def declined(batch):
    """Decline what the losses do not take."""
    if batch.advantages.ndim > 1:
        raise NotProvided("an advantage per completion")
    if batch.global_tokens is not None or batch.global_sequences is not None:
        raise NotProvided("counts of the whole update are not passed")


def scored(entropy):
    """Let the losses take their first argument for logprobs."""

    def given(logprobs, *_, **__):
        return logprobs, torch.zeros_like(logprobs) if entropy is None else entropy

    return patch.object(losses, "compute_logprobs", given)


def quiet():
    """Swallow what the functions print at every call."""
    return contextlib.redirect_stdout(io.StringIO())
