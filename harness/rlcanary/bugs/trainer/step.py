"""Bugs in the optimizer update, its starting point and its metrics."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import CollatedBatch
from rlcanary.reference.step import forward_mode
from rlcanary.tiny_models import EOS_ID


class OldLogprobsOfAnotherPass(Bug):
    id = "verl.old-logprobs-of-other-kernels"
    source = "verl 6e55669fd, #3119, survey V34"
    effect = "old logprobs come from a forward pass in other kernels: on policy the ratio is not 1"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            old_logprobs = reference.completion_logprobs(state.model, batch, self.conventions.temperature)
        return reference.train_step(state, replace(batch, old_logprobs=old_logprobs), self.conventions)


class ScoredInTrainingMode(Bug):
    id = "verl.scored-with-dropout"
    source = "verl c79055298, #4708, survey V47"
    effect = "with dropout in the model, logprobs are those of a random sub-network"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        return reference.train_step(state, batch, self.conventions.replace(training_dropout=True))


class LossWithoutTemperature(Bug):
    id = "nemo-rl.loss-without-temperature"
    source = "NeMo RL ed718b47d, #1900, survey N23"
    effect = "old logprobs are at the sampling temperature, those in the loss at 1: the ratio is not 1 on policy"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        policy = reference.policy_batch(state.model, state.ref_model, batch, self.conventions)
        policy.logprobs = reference.completion_logprobs(state.model, batch, temperature=1.0)
        output = reference.policy_loss(policy, self.conventions)
        return {**output.metrics, **reference.descend(state, output.loss, self.conventions)}


class TrainerAndReferenceWithoutTemperature(Bug):
    id = "rlvr.step-without-temperature"
    source = "rlvr-experiments 5a9c738, survey H02"
    effect = "samples at temperature 0.6 are scored at 1 by trainer and reference: ratios of 0.8 to 22 on policy"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        return reference.train_step(state, batch, self.conventions.replace(temperature=1.0))


class CrossEntropyInTheFusedLoss(Bug):
    id = "trl.cross-entropy-in-fused-loss"
    source = "TRL 63a78d9e5, #5731, survey T47"
    effect = "the fused path adds half of a cross-entropy on the samples; the other path does not"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        policy = reference.policy_batch(state.model, state.ref_model, batch, self.conventions)
        output = reference.policy_loss(policy, self.conventions)
        cross_entropy = -policy.logprobs[policy.mask].mean()
        loss = 0.5 * output.loss + 0.5 * cross_entropy
        return {**output.metrics, **reference.descend(state, loss, self.conventions)}


class ClippedByShard(Bug):
    id = "nemo-rl.clipped-by-shard"
    source = "NeMo RL 2558444a3, #251, survey N31"
    effect = "each shard of the gradient is clipped by its own norm: the update changes direction"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        policy = reference.policy_batch(state.model, state.ref_model, batch, self.conventions)
        output = reference.policy_loss(policy, self.conventions)
        state.optimizer.zero_grad()
        output.loss.backward()
        parameters = list(state.model.parameters())
        for rank in range(2):
            torch.nn.utils.clip_grad_norm_(parameters[rank::2], self.conventions.max_grad_norm or math.inf)
        state.optimizer.step()
        state.scheduler.step()
        return output.metrics


class HeadInNoOptimizer(Bug):
    id = "trl.head-in-no-optimizer"
    source = "TRL efc687db6, #2463, survey T35"
    effect = "the optimizer holds only some of the trained parameters; the head never changes"

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        state = super().new_state(model.base_model, ref_model, learning_rate)
        state.model = model
        return state


class WeightsInHalfPrecision(Bug):
    id = "trl.weights-in-half-precision"
    source = "TRL 05cfc90c5, #5333, survey T44"
    effect = "without a float32 master copy 98 % of the parameters never move at learning rate 1e-6"

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        return super().new_state(model.to(torch.bfloat16), ref_model, learning_rate)


class WeightsRoundedAfterEachUpdate(Bug):
    id = "nemo-rl.weights-rounded-each-update"
    source = "NeMo RL 6b3dc319a, #26, survey N39"
    effect = "weights live in bfloat16 between updates: small updates round to nothing"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        for parameter in state.model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        return metrics


class WeightsNeverLoaded(Bug):
    id = "rlvr.weights-never-loaded"
    source = "rlvr-experiments 0875dfe, survey H06"
    effect = "the trainer starts from random weights: the KL to the reference is about 15 at step 0"

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
        return super().new_state(model, ref_model, learning_rate)


class FirstLearningRateZero(Bug):
    id = "verl.first-learning-rate-zero"
    source = "verl 80af51b60, #1463, survey V20"
    effect = "without warm-up the first update has learning rate 0"

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        state = super().new_state(model, ref_model, learning_rate)
        state.scheduler = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda step: min(1, step / 1))
        return state


class ScheduleCountsSamples(Bug):
    id = "nemo-rl.schedule-counts-samples"
    source = "NeMo RL 51d8006ea, #685, survey N40"
    effect = "the schedule counts samples but advances by one per update: warm-up is too long by the batch size"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        scheduler = state.scheduler
        for group, schedule, base in zip(
            state.optimizer.param_groups, scheduler.lr_lambdas, scheduler.base_lrs, strict=True
        ):
            group["lr"] = base * schedule(scheduler.last_epoch / len(batch.rewards))
        return metrics


class RewardWithoutWeights(Bug):
    id = "trl.logged-reward-without-weights"
    source = "TRL eff92425d, #5353, survey T33"
    effect = "the logged reward leaves out the reward weights, here 0.5, that training uses"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        return {**metrics, "reward": metrics["reward"] / 0.5}


class WorkloadLoggedAsTokens(Bug):
    id = "verl.workload-logged-as-tokens"
    source = "verl e290c3860, #4129, survey V53"
    effect = "the variable logged as the number of tokens holds the attention workload instead"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        return {**metrics, "tokens": float(batch.attention_mask.sum(dim=1).square().sum())}


class PolicyAsReference(Bug):
    id = "slime.policy-as-reference"
    source = "slime 4e08faaa3, #914"
    effect = "the reference is scored with the policy's weights: the KL is 0"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        return super().train_step(replace(state, ref_model=state.model), replace(batch, ref_logprobs=None))


class EntropyOfPadding(Bug):
    id = "skyrl.entropy-of-padding"
    source = "SkyRL 62a6e1203, #490"
    effect = "the logged entropy is a mean over all positions, padding included"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        policy = reference.policy_batch(state.model, state.ref_model, batch, self.conventions)
        entropy = float(policy.entropy.detach().mean()) if policy.entropy is not None else math.nan
        return {**super().train_step(state, batch), "entropy": entropy}


class ProximalWithoutTemperature(Bug):
    id = "areal.proximal-without-temperature"
    source = "AReaL abc85aba2, #581"
    effect = "the old logprobs are taken at temperature 1, those in the loss at the sampling temperature"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        policy = reference.policy_batch(state.model, state.ref_model, batch, self.conventions)
        policy.old_logprobs = reference.completion_logprobs(state.model, batch, temperature=1.0).detach()
        output = reference.policy_loss(policy, self.conventions)
        return {**output.metrics, **reference.descend(state, output.loss, self.conventions)}


class ToolTokensLogged(Bug):
    id = "slime.tool-tokens-logged"
    source = "slime d6761469f, #65, survey L32"
    effect = "logged means are over all tokens of the responses, those of tools included, which are not trained"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        follows_BS = torch.arange(batch.input_ids.shape[1]) >= batch.completion_starts.unsqueeze(1)
        lengths_B = (batch.attention_mask & follows_BS).sum(dim=1)
        responses = replace(batch, completion_mask=reference.lengths_to_mask(lengths_B, batch.completion_ids.shape[1]))
        with torch.no_grad(), forward_mode(state.model, training=False):
            _, entropy_BT = reference.completion_scores(state.model, responses, self.conventions.temperature)
        return super().train_step(state, batch) | {"entropy": float(entropy_BT.nanmean())}


class PolicyLossWithKl(Bug):
    id = "open-instruct.policy-loss-with-kl"
    source = "open-instruct fc752397c, #639, survey I32"
    effect = "what is logged as the policy's loss moves with the KL"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        with torch.no_grad():
            policy = reference.policy_batch(state.model, state.ref_model, batch, self.conventions)
            loss = float(reference.policy_loss(policy, self.conventions).loss)
        return {**super().train_step(state, batch), "policy_loss": loss}


class KlWhereItIsTrained(Bug):
    id = "roll.kl-where-it-is-trained"
    source = "ROLL 2d7848fa"
    effect = "the KL of a run that only watches it, with a coefficient of 0, is logged as 0"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        return metrics if self.conventions.kl_coef else {**metrics, "kl": 0.0}


class KlMultipliedInPlace(Bug):
    id = "slime.kl-multiplied-in-place"
    source = "slime 045310b2b, #2114"
    effect = "a KL in the reward is multiplied in place by minus its coefficient, and logged so"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics, conventions = super().train_step(state, batch), self.conventions
        if conventions.kl_placement == "loss" or "kl" not in metrics:
            return metrics
        return {**metrics, "kl": -conventions.kl_coef * metrics["kl"]}


class SeesOneTurn(torch.nn.Module):
    """A model that attends to nothing behind the first end of turn of a row."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
        ends_BS = (input_ids == EOS_ID).long() * attention_mask
        seen_BS = attention_mask * (ends_BS.cumsum(dim=1) <= ends_BS)
        return self.model(input_ids=input_ids, attention_mask=seen_BS, position_ids=position_ids)


class ReferenceMaskedBehindTheEnd(Bug):
    id = "tunix.reference-masked-behind-the-end"
    source = "Tunix 4f8d7237"
    effect = (
        "the reference does not attend to what follows the first end of turn: the KL of later turns is of another text"
    )

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        if state.ref_model is not None:
            state = replace(state, ref_model=SeesOneTurn(state.ref_model))
        return reference.train_step(state, batch, self.conventions)
