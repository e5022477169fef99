"""Bugs in weight sync."""

from typing import Any

import torch

from rlcanary.bugs.museum import Bug
from rlcanary.contract.engine import InProcessEngine


class PrefixesKept(Bug):
    id = "N07"
    source = "NeMo RL 535eaab06, #112"
    effect = "new samples attend to keys and values of the old weights: up to 0.7 nats off"

    def sync_weights(self, state: Any, engine: Any) -> None:
        engine.load_weights(state.model.named_parameters())
        engine.version += 1


class PrefixesKeptByTheServer(Bug):
    id = "P17"
    source = "prime-rl e67022bb3, #1650"
    effect = "the cache is emptied before the weights change, and a request in between fills it again"

    def sync_weights(self, state: Any, engine: Any) -> None:
        engine.reset_prefix_cache()
        engine.generate([list(range(3, 51))], {"max_new_tokens": 1})
        engine.load_weights(state.model.named_parameters())
        engine.version += 1


class PrefixesKeptUnlessInFlight(Bug):
    id = "N37"
    source = "NeMo RL d4901ff62, #3152"
    effect = "the cache is emptied only where updates in flight are on, which has nothing to do with it"

    in_flight_updates = False

    def sync_weights(self, state: Any, engine: Any) -> None:
        engine.load_weights(state.model.named_parameters())
        if self.in_flight_updates:
            engine.reset_prefix_cache()
        engine.version += 1


class _CachingEngine(InProcessEngine):
    def reset_prefix_cache(self) -> None:
        """Do nothing: this engine's cache cannot be emptied."""


class PrefixCachingSwitchedOn(Bug):
    id = "O17"
    source = "OpenRLHF 685a9605"
    effect = "prefix caching is on in an engine that cannot empty its cache"

    def new_engine(self, model: Any) -> Any:
        return _CachingEngine(model)


class SyncedOnlyOnce(Bug):
    id = "V42"
    source = "verl b96b9ab53, #4248"
    effect = "the sampler keeps the weights of the first sync: everything is more and more off policy"

    def sync_weights(self, state: Any, engine: Any) -> None:
        if engine.version == 0:
            super().sync_weights(state, engine)
        else:
            engine.version += 1


class _PackingEngine(InProcessEngine):
    """Engine that computes its output layer from a packed copy of the weights, made at its start."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        packed = self.model.lm_head.weight.clone()
        self.model.lm_head.register_forward_hook(lambda layer, inputs, output: inputs[0] @ packed.T)


class DerivedWeightsNotMadeAgain(Bug):
    id = "V43"
    source = "verl e2d45b00e, #4130"
    effect = "weights that are derived from the loaded ones keep their start values"

    def new_engine(self, model: Any) -> Any:
        return _PackingEngine(model)


class OnlyTheAdapterSent(Bug):
    id = "V44"
    source = "verl b8c6d132a, #3461"
    effect = "of a model with an adapter only the adapter's tensors are sent; the base is another model"

    def sync_weights(self, state: Any, engine: Any) -> None:
        adapted = ("q_proj", "v_proj")
        weights = state.model.named_parameters()
        engine.load_weights((name, weight) for name, weight in weights if any(part in name for part in adapted))
        engine.reset_prefix_cache()
        engine.version += 1


class VersionCountedTwice(Bug):
    id = "P23"
    source = "prime-rl b84a07a25, #1764"
    effect = "the policy lag is counted twice: samples are thrown away at half the allowed age"

    def sync_weights(self, state: Any, engine: Any) -> None:
        super().sync_weights(state, engine)
        engine.version += 1


class QueriesKeysValuesInAnotherLayout(Bug):
    id = "N33"
    source = "NeMo RL c848c7a50, #2802"
    effect = "heads of queries and keys change places where several query heads share a key head; shapes are equal"

    def sync_weights(self, state: Any, engine: Any) -> None:
        heads, groups = state.model.config.num_attention_heads, state.model.config.num_key_value_heads

        def regrouped(name: str, weight: torch.Tensor) -> torch.Tensor:
            if "q_proj" not in name:
                return weight
            by_group = weight.detach().reshape(groups, heads // groups, -1, weight.shape[-1])
            return by_group.transpose(0, 1).reshape(weight.shape)

        engine.load_weights((name, regrouped(name, weight)) for name, weight in state.model.named_parameters())
        engine.reset_prefix_cache()
        engine.version += 1
