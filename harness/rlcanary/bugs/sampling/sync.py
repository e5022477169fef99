"""Bugs in weight sync."""

from functools import cached_property
from typing import Any

import torch

from rlcanary.bugs.museum import Bug
from rlcanary.contract.engine import InProcessEngine


class PrefixesKept(Bug):
    id = "nemo-rl.prefix-cache-kept"
    source = "NeMo RL 535eaab06, #112, survey N07"
    effect = "new samples attend to keys and values of the old weights: up to 0.7 nats off"

    def sync_weights(self, state: Any, engine: Any) -> None:
        engine.load_weights(state.model.named_parameters())
        engine.version += 1


class PrefixesKeptByTheServer(Bug):
    id = "prime-rl.prefix-cache-refilled"
    source = "prime-rl e67022bb3, #1650, survey P17"
    effect = "the cache is emptied before the weights change, and a request in between fills it again"

    def sync_weights(self, state: Any, engine: Any) -> None:
        engine.reset_prefix_cache()
        engine.generate([list(range(3, 51))], {"max_new_tokens": 1})
        engine.load_weights(state.model.named_parameters())
        engine.version += 1


class PrefixesKeptUnlessInFlight(Bug):
    id = "nemo-rl.prefix-cache-kept-when-idle"
    source = "NeMo RL d4901ff62, #3152, survey N37"
    effect = "the cache is emptied only with in-flight updates on, a setting that is unrelated"

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
    id = "openrlhf.prefix-cache-never-emptied"
    source = "OpenRLHF 685a9605, survey O17"
    effect = "prefix caching is on in an engine that cannot empty its cache"

    def new_engine(self, model: Any) -> Any:
        return _CachingEngine(model)


class SyncedOnlyOnce(Bug):
    id = "verl.synced-only-once"
    source = "verl b96b9ab53, #4248, survey V42"
    effect = "the sampler keeps the weights of the first sync: training is more and more off policy"

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
        self.model.lm_head.register_forward_hook(lambda _layer, inputs, _output: inputs[0] @ packed.T)


class DerivedWeightsNotMadeAgain(Bug):
    id = "verl.derived-weights-stale"
    source = "verl e2d45b00e, #4130, survey V43"
    effect = "weights that are derived from the loaded ones keep their start values"

    def new_engine(self, model: Any) -> Any:
        return _PackingEngine(model)


class OnlyTheAdapterSent(Bug):
    id = "verl.only-lora-synced"
    source = "verl b8c6d132a, #3461, survey V44"
    effect = "only the tensors of the LoRA adapter are sent; the engine's base is another model"

    def sync_weights(self, state: Any, engine: Any) -> None:
        adapted = ("q_proj", "v_proj")
        weights = state.model.named_parameters()
        engine.load_weights((name, weight) for name, weight in weights if any(part in name for part in adapted))
        engine.reset_prefix_cache()
        engine.version += 1


class VersionCountedTwice(Bug):
    id = "prime-rl.version-counted-twice"
    source = "prime-rl b84a07a25, #1764, survey P23"
    effect = "the policy lag is counted twice: samples are thrown away at half the allowed age"

    def sync_weights(self, state: Any, engine: Any) -> None:
        super().sync_weights(state, engine)
        engine.version += 1


class QueriesKeysValuesInAnotherLayout(Bug):
    id = "nemo-rl.qkv-layout"
    source = "NeMo RL c848c7a50, #2802, survey N33"
    effect = "query and key heads are permuted with grouped-query attention; shapes are equal"

    def sync_weights(self, state: Any, engine: Any) -> None:
        heads, groups = state.model.config.num_attention_heads, state.model.config.num_key_value_heads

        def regrouped(name: str, weight: torch.Tensor) -> torch.Tensor:
            if "q_proj" not in name or "lora_" in name or weight.ndim < 2:
                return weight
            by_group = weight.detach().reshape(groups, heads // groups, -1, weight.shape[-1])
            return by_group.transpose(0, 1).reshape(weight.shape)

        engine.load_weights((name, regrouped(name, weight)) for name, weight in state.model.named_parameters())
        engine.reset_prefix_cache()
        engine.version += 1


class ExpertsNeverSent(Bug):
    id = "skyrl.bucket-never-sent"
    source = "SkyRL 7ba249064, #1471"
    effect = "weights that are split over two buckets are in neither: the engine keeps its start values for them"

    def sync_weights(self, state: Any, engine: Any) -> None:
        engine.load_weights((name, weight) for name, weight in state.model.named_parameters() if "mlp.up" not in name)
        engine.reset_prefix_cache()
        engine.version += 1


class BucketsOfTheFirstSync(Bug):
    id = "skyrl.buckets-of-the-first-sync"
    source = "SkyRL 957640ed0, #1345"
    effect = "converted weights are kept with their buckets: from the second sync on some of them are old"

    def sync_weights(self, state: Any, engine: Any) -> None:
        if not hasattr(engine, "buckets"):
            engine.buckets = {
                name: weight.detach().clone() for name, weight in state.model.named_parameters() if "k_proj" in name
            }
        engine.load_weights((name, engine.buckets.get(name, weight)) for name, weight in state.model.named_parameters())
        engine.reset_prefix_cache()
        engine.version += 1


class BlockOfZeros(Bug):
    id = "slime.block-of-zeros"
    source = "slime dd4851f26, #2256"
    effect = "weights are divided by the largest of their block, which makes NaN of a block of zeros"

    def sync_weights(self, state: Any, engine: Any) -> None:
        def scaled(weight: torch.Tensor) -> torch.Tensor:
            if weight.ndim < 2:
                return weight
            largest = weight.detach().abs().amax(dim=-1, keepdim=True)
            return weight.detach() / largest * largest

        engine.load_weights((name, scaled(weight)) for name, weight in state.model.named_parameters())
        engine.reset_prefix_cache()
        engine.version += 1


class PackedAsMemoryLies(Bug):
    id = "verl.packed-as-memory-lies"
    source = "verl c47d54e83, #6919"
    effect = (
        "the bytes of a weight are packed as if its memory had the order of its shape; where it has not, verl raised"
    )

    def sync_weights(self, state: Any, engine: Any) -> None:
        def packed(weight: torch.Tensor) -> torch.Tensor:
            return weight.detach().as_strided((weight.numel(),), (1,)).view(weight.shape)

        engine.load_weights((name, packed(weight)) for name, weight in state.model.named_parameters())
        engine.reset_prefix_cache()
        engine.version += 1


class AsynchronousRequestsOfTheBase(Bug):
    id = "ms-swift.async-without-adapter"
    source = "ms-swift 9298fb8a9, #9856"
    effect = "requests to the asynchronous entry name no LoRA adapter: the weights at the start answer them"

    def new_engine(self, model: Any) -> Any:
        engine = super().new_engine(model)
        engine.agenerate = super().new_engine(model).agenerate
        return engine


class EnginesOfOneName(Bug):
    id = "areal.engines-of-one-name"
    source = "AReaL 0e4b69474, #941"
    effect = "two engines register under one name: both get the weights, and the one that came last all versions"

    @cached_property
    def registered(self) -> dict[type, Any]:
        return {}

    def new_engine(self, model: Any) -> Any:
        engine = super().new_engine(model)
        self.registered[type(engine)] = engine
        return engine

    def sync_weights(self, state: Any, engine: Any) -> None:
        start = engine.version
        super().sync_weights(state, engine)
        engine.version = start
        self.registered.get(type(engine), engine).version += 1
