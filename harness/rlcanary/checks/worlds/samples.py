"""Comparison of an engine's samples with the trainer's model."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rlcanary.checks.worlds.training.states import device_of, named, nats, precision, shaken
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import Completion
from rlcanary.contract.engine import Engine
from rlcanary.contract.layers import copied


def sampling(**changes: Any) -> dict[str, Any]:
    """Return a request of the fields that every engine has: by default one completion of at most 4 tokens."""
    fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 4, "n": 1, "seed": None}
    return {**fields, "eos_token_ids": (), "logprobs": "processed", **changes}


def scored(model: Any, prompt: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[T, V] float64 logprobs, on the CPU, of all tokens at each place of a completion: without a cache, a batch or dropout.

    Weights in half precision are used as they are; values computed from them are not rounded.
    """
    is_training = any(module.training for module in model.modules())
    frozen = copied(model).eval() if is_training else model
    if precision(model) not in (torch.float32, torch.float64):
        frozen = copied(frozen).double()
    with torch.no_grad():
        ids_1S = torch.tensor([[*prompt, *token_ids]]).to(device_of(model))
        positions_1S = torch.arange(ids_1S.shape[1], device=ids_1S.device).unsqueeze(0)
        output = frozen(input_ids=ids_1S, attention_mask=torch.ones_like(ids_1S), position_ids=positions_1S)
        logits_SV: Tensor = output.logits[0].double().cpu()
    return (logits_SV[len(prompt) - 1 : -1] / temperature).log_softmax(dim=-1)


def trainer_logprobs(model: Any, prompt: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[T] float64 logprobs of a completion."""
    ids_T1 = torch.tensor(list(token_ids), dtype=torch.long).unsqueeze(1)
    return scored(model, prompt, token_ids, temperature).gather(1, ids_T1).squeeze(1)


def shortfall(model: Any, prompt: Sequence[int], token_ids: Sequence[int]) -> float:
    """Return the largest gap in nats between a token of a completion and the likeliest token in its place."""
    scores_TV = scored(model, prompt, token_ids)
    ids_T1 = torch.tensor(list(token_ids)).unsqueeze(1)
    return float((scores_TV.amax(dim=1) - scores_TV.gather(1, ids_T1).squeeze(1)).max())


def allowed(adapter: Adapter, model: Any) -> float:
    """Return the allowed difference in nats between an engine's logprobs and those of the trainer's model."""
    return max(nats(model), adapter.conventions.engine_tolerance)


def synced(adapter: Adapter, state: Any) -> set[str]:
    """Return the names of the parameters that a weight sync brings: all, or the trained where the engine keeps its base."""
    sends_all = adapter.conventions.sync_frozen
    return {name for name, parameter in named(state.model).items() if sends_all or parameter.requires_grad}


def moved_on(adapter: Adapter, state: Any) -> Any:
    """Add noise to what a weight sync brings until the state's logprobs are away from those of an engine in step."""
    return shaken(state, allowed(adapter, state.model), synced(adapter, state))


def gap(engine: Any, model: Any, prompt: Sequence[int], max_new_tokens: int = 4) -> float:
    """Return the distance in nats of an engine's greedy continuation from the trainer's, in choices or logprobs."""
    request = sampling(temperature=0.0, max_new_tokens=max_new_tokens)
    return _distance(model, [prompt], engine.generate([list(prompt)], request))


def gaps(engine: Any, model: Any, prompt: Sequence[int]) -> dict[str, float]:
    """Return the distance in nats of an engine's answers from the trainer's, for each entry point that it has, by name."""
    distances = {"generate": gap(engine, model, prompt)}
    if math.isnan(distances["generate"]):
        return distances  # nothing can be drawn from its distribution
    # An engine such as vLLM takes no greedy request for several completions.
    greedy, several = sampling(temperature=0.0), sampling(n=2, max_new_tokens=1)
    two = [list(prompt), list(prompt[:-1])]
    with suppress(NotProvided, NotImplementedError):
        distances["generate of two prompts"] = _distance(model, two, engine.generate(two, several))
    if not _has_own_agenerate(engine):
        return distances

    async def at_once() -> Any:
        return await asyncio.gather(*map(engine.agenerate, two, (greedy, several)))

    with suppress(NotProvided, NotImplementedError):
        distances["agenerate"] = _distance(model, two, asyncio.run(at_once()))
    return distances


def _has_own_agenerate(engine: Any) -> bool:
    """Tell whether an engine's asynchronous requests are its own.

    A class that names the protocol as its base inherits a method without a body, and one that writes `generate` alone
    inherits an `agenerate` of another engine.
    """
    if "agenerate" in vars(engine):
        return True
    for each in type(engine).__mro__:
        if "agenerate" in vars(each):
            return each is not Engine
        if "generate" in vars(each):
            return False
    return hasattr(engine, "agenerate")


def _distance(model: Any, prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Completion]]) -> float:
    """Return the largest distance in nats of completions from the trainer, in logprobs and in the choices of single ones."""
    distances = [0.0]
    for prompt, completions in zip(prompts, groups, strict=True):
        for completion in completions:
            scores_TV = scored(model, prompt, completion.token_ids)
            exact_T = scores_TV.gather(1, torch.tensor(list(completion.token_ids)).unsqueeze(1)).squeeze(1)
            if len(completions) == 1:
                distances.append(float((scores_TV.amax(dim=1) - exact_T).max()))
            if completion.logprobs is not None:
                distances.append(float((torch.tensor(list(completion.logprobs)).double() - exact_T).abs().max()))
    # Of numbers with a NaN torch finds the NaN largest.
    return float(torch.tensor(distances, dtype=torch.float64).max())


def distribution(
    model: Any, prompt: Sequence[int], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """[V] float64 probabilities of the first token: the temperature first, then one of the two filters.

    `top_k` keeps that many of the likeliest tokens, 0 all; `top_p` keeps the fewest likeliest tokens with at least that
    total probability.
    """
    ranked_V, order_V = scored(model, prompt, [0], temperature)[0].exp().sort(descending=True)
    kept = top_k or len(ranked_V)
    if top_p < 1:
        kept = int((ranked_V.cumsum(dim=0) < top_p).sum()) + 1
    ranked_V[kept:] = 0
    return torch.zeros_like(ranked_V).scatter(0, order_V, ranked_V / ranked_V.sum())


def near_a_cut(
    model: Any, prompt: Sequence[int], tolerance: float, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> set[int]:
    """Return the tokens that top-k or top-p keep or drop by no more than an engine's tolerance, in nats at temperature 1."""
    if not tolerance or (top_k == 0 and top_p == 1):
        return set()
    logprobs_V = scored(model, prompt, [0])[0]
    kept_V = distribution(model, prompt, temperature, top_k, top_p) > 0
    # Each logprob may be off by the tolerance, those on both sides of the cut in opposite directions.
    last, first = logprobs_V[kept_V].min(), logprobs_V[~kept_V].max()
    near_V = torch.where(kept_V, logprobs_V - first, last - logprobs_V) < 2 * tolerance
    return set(near_V.nonzero().flatten().tolist())


def p_value(drawn: Sequence[int], probabilities_V: Tensor, tolerance: float = 0.0) -> float:
    """Return the probability of draws at least this far from the distribution, by the chi-square test.

    Logprobs may be off by the tolerance, in nats: the statistic is the squared length of a vector, of which what that moves
    is a part. The rarest tokens are pooled until at least ten of them are expected, as the test's approximation requires.
    """
    counts = Counter(drawn)
    if any(probabilities_V[token] == 0 for token in counts):
        return 0.0
    bins: list[tuple[float, int]] = [(0.0, 0)]
    for probability, token in sorted((float(share), token) for token, share in enumerate(probabilities_V)):
        expected, observed = bins[-1]
        if expected >= 10:
            bins.append((0.0, 0))
            expected, observed = bins[-1]
        bins[-1] = (expected + probability * len(drawn), observed + counts[token])
    if len(bins) > 1 and bins[-1][0] < 10:
        last = bins.pop()
        bins[-1] = (bins[-1][0] + last[0], bins[-1][1] + last[1])
    if len(bins) < 2:
        return 1.0
    excused = math.sqrt(len(drawn)) * math.expm1(tolerance)
    length = math.sqrt(sum((observed - expected) ** 2 / expected for expected, observed in bins))
    statistic = max(length - excused, 0.0) ** 2
    degrees = torch.tensor((len(bins) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))


def wrong_ending(completion: Completion, eos_token_ids: Sequence[int], max_new_tokens: int) -> str | None:
    """Describe a wrong ending of a completion; None if it is right."""
    token_ids = [int(token) for token in completion.token_ids]
    has_eos = bool(token_ids) and token_ids[-1] in eos_token_ids
    if len(token_ids) > max_new_tokens:
        return f"{len(token_ids)} tokens where {max_new_tokens} were allowed"
    if any(token in eos_token_ids for token in token_ids[:-1]):
        return "tokens behind an end-of-sequence token"
    if not has_eos and len(token_ids) < max_new_tokens:
        return "neither an end-of-sequence token at the end nor the full length"
    # An end-of-sequence token in the very last place is both.
    expected = {"length"} if not has_eos else {"stop"} if len(token_ids) < max_new_tokens else {"stop", "length"}
    if completion.finish_reason not in expected:
        return f"the finish reason {completion.finish_reason!r} instead of {sorted(expected)[0]!r}"
    return None


def breaking_off(engine: Any) -> Any:
    """Make the engine lose its connection once, after three weights have arrived."""
    load_weights = engine.load_weights

    def load_some(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        engine.load_weights = load_weights
        load_weights(islice(weights, 3))
        raise ConnectionError("the connection to the engine was lost")

    engine.load_weights = load_some
    return engine


def sampling_first(engine: Any, prompt: list[int]) -> None:
    """Make the engine answer a request whenever weights arrive, before it takes them."""
    load_weights = engine.load_weights

    def load(weights: Iterable[tuple[str, Tensor]]) -> Any:
        engine.generate([prompt], sampling())
        return load_weights(weights)

    engine.load_weights = load
