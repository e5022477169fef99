"""Bugs in the optimizer update, its starting point and its metrics."""

import math
from dataclasses import replace
from typing import Any

import torch

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import CollatedBatch


class OldLogprobsOfAnotherPass(Bug):
    id = "V34"
    source = "verl 6e55669fd, #3119"
    effect = "old logprobs come from a pass in other kernels: on policy the ratio is not 1"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            old_logprobs = reference.completion_logprobs(state.model, batch, self.conventions.temperature)
        return reference.train_step(state, replace(batch, old_logprobs=old_logprobs), self.conventions)


class ScoredInTrainingMode(Bug):
    id = "V47"
    source = "verl c79055298, #4708"
    effect = "with dropout in the model, logprobs are those of a random sub-network"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        return reference.train_step(state, batch, self.conventions.replace(training_dropout=True))


class LossWithoutTemperature(Bug):
    id = "N23"
    source = "NeMo RL ed718b47d, #1900"
    effect = "old logprobs are at the sampling temperature, those in the loss at 1: the ratio is not 1 on policy"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        policy = reference.policy_batch(state.model, state.ref_model, batch, self.conventions)
        policy.logprobs = reference.completion_logprobs(state.model, batch, temperature=1.0)
        output = reference.policy_loss(policy, self.conventions)
        return {**output.metrics, **reference.descend(state, output.loss, self.conventions)}


class TrainerAndReferenceWithoutTemperature(Bug):
    id = "H02"
    source = "rlvr-experiments 5a9c738"
    effect = "what was sampled at 0.6 is scored at 1 by trainer and reference: ratios between 0.8 and 22 on policy"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        return reference.train_step(state, batch, self.conventions.replace(temperature=1.0))


class CrossEntropyInTheFusedLoss(Bug):
    id = "T47"
    source = "TRL 63a78d9e5, #5731"
    effect = "the fused path mixes in half of a cross-entropy on the samples, which the other path does not have"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        policy = reference.policy_batch(state.model, state.ref_model, batch, self.conventions)
        output = reference.policy_loss(policy, self.conventions)
        cross_entropy = -policy.logprobs[policy.mask].mean()
        loss = 0.5 * output.loss + 0.5 * cross_entropy
        return {**output.metrics, **reference.descend(state, loss, self.conventions)}


class ClippedByShard(Bug):
    id = "N31"
    source = "NeMo RL 2558444a3, #251"
    effect = "each shard of the gradient is clipped by its own norm: the update points elsewhere"

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
    id = "T35"
    source = "TRL efc687db6, #2463"
    effect = "the optimizer was built from a part of what is trained; the head stays at its start"

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        state = super().new_state(model.model, ref_model, learning_rate)
        state.model = model
        return state


class WeightsInHalfPrecision(Bug):
    id = "T44"
    source = "TRL 05cfc90c5, #5333"
    effect = "without a float32 master copy 98 % of the parameters never move at learning rate 1e-6"

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        return super().new_state(model.to(torch.bfloat16), ref_model, learning_rate)


class WeightsRoundedAfterEachUpdate(Bug):
    id = "N39"
    source = "NeMo RL 6b3dc319a, #26"
    effect = "weights live in bfloat16 between updates: small updates round to nothing"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        for parameter in state.model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        return metrics


class WeightsNeverLoaded(Bug):
    id = "H06"
    source = "rlvr-experiments 0875dfe"
    effect = "the trainer starts from random weights: the KL to the reference is about 15 at step 0"

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
        return super().new_state(model, ref_model, learning_rate)


class FirstLearningRateZero(Bug):
    id = "V20"
    source = "verl 80af51b60, #1463"
    effect = "without warm-up the first update has learning rate 0"

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        state = super().new_state(model, ref_model, learning_rate)
        state.scheduler = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda step: min(1, step / 1))
        return state


class ScheduleCountsSamples(Bug):
    id = "N40"
    source = "NeMo RL 51d8006ea, #685"
    effect = "the schedule is counted in samples and moved on by one per update: warm-up takes as many times longer"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        scheduler = state.scheduler
        for group, schedule, base in zip(
            state.optimizer.param_groups, scheduler.lr_lambdas, scheduler.base_lrs, strict=True
        ):
            group["lr"] = base * schedule(scheduler.last_epoch / len(batch.rewards))
        return metrics


class RewardWithoutWeights(Bug):
    id = "T33"
    source = "TRL eff92425d, #5353"
    effect = "the logged reward leaves out the reward weights, here 0.5, that training uses"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        return {**metrics, "reward": metrics["reward"] / 0.5}


class WorkloadLoggedAsTokens(Bug):
    id = "V53"
    source = "verl e290c3860, #4129"
    effect = "the variable that is logged as the number of tokens holds the workload of attention by then"

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        return {**metrics, "tokens": float(batch.attention_mask.sum(dim=1).square().sum())}
