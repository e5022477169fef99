"""What a trainer says about the samples of an engine. Snippets import these names."""

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from rlcanary.engine import Sampling


def sampling(**changes: Any) -> dict[str, Any]:
    """A request with all its fields: by default one completion of at most 4 tokens at temperature 1."""
    return asdict(Sampling(**{"max_new_tokens": 4, **changes}))


def scored(model: Any, prompt: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[T, V] float64 logprobs of all tokens at each place of a completion: without a cache, a batch or dropout."""
    frozen = copy.deepcopy(model).eval()
    with torch.no_grad():
        logits_SV: Tensor = frozen(input_ids=torch.tensor([[*prompt, *token_ids]])).logits[0].double()
    return (logits_SV[len(prompt) - 1 : -1] / temperature).log_softmax(dim=-1)


def trainer_logprobs(model: Any, prompt: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[T] float64 logprobs of a completion."""
    ids_T1 = torch.tensor(list(token_ids)).unsqueeze(1)
    return scored(model, prompt, token_ids, temperature).gather(1, ids_T1).squeeze(1)


def shortfall(model: Any, prompt: Sequence[int], token_ids: Sequence[int]) -> float:
    """By how many nats, at most, a token of a completion is less likely than the likeliest in its place."""
    scores_TV = scored(model, prompt, token_ids)
    ids_T1 = torch.tensor(list(token_ids)).unsqueeze(1)
    return float((scores_TV.amax(dim=1) - scores_TV.gather(1, ids_T1).squeeze(1)).max())


def gap(engine: Any, model: Any, prompt: Sequence[int], max_new_tokens: int = 4) -> float:
    """How far an engine's greedy continuation is from the trainer's, in nats: in its choices or in its logprobs."""
    ((completion,),) = engine.generate([list(prompt)], sampling(temperature=0.0, max_new_tokens=max_new_tokens))
    distance = shortfall(model, prompt, completion.token_ids)
    if completion.logprobs is None:
        return distance
    exact_T = trainer_logprobs(model, prompt, completion.token_ids)
    difference = float((torch.tensor(list(completion.logprobs)).double() - exact_T).abs().max())
    return math.nan if math.isnan(difference) else max(distance, difference)


def distribution(
    model: Any, prompt: Sequence[int], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """[V] float64 probabilities of the first token: the temperature first, then one of the two filters.

    `top_k` keeps so many of the likeliest tokens, 0 all; `top_p` the fewest likeliest that hold this probability.
    """
    ranked_V, order_V = scored(model, prompt, [0], temperature)[0].exp().sort(descending=True)
    kept = top_k or len(ranked_V)
    if top_p < 1:
        kept = int((ranked_V.cumsum(dim=0) < top_p).sum()) + 1
    ranked_V[kept:] = 0
    return torch.zeros_like(ranked_V).scatter(0, order_V, ranked_V / ranked_V.sum())


def p_value(drawn: Sequence[int], probabilities_V: Tensor) -> float:
    """How likely draws at least this far from the distribution are, by the chi-square test.

    Tokens that are expected less than five times are counted together, as the test's approximation asks for.
    """
    counts = Counter(drawn)
    if any(probabilities_V[token] == 0 for token in counts):
        return 0.0
    observed_V = torch.tensor([counts[token] for token in range(len(probabilities_V))], dtype=torch.float64)
    expected_V = probabilities_V * len(drawn)
    is_rare_V = expected_V < 5
    observed = torch.cat([observed_V[~is_rare_V], observed_V[is_rare_V].sum().reshape(1)])
    expected = torch.cat([expected_V[~is_rare_V], expected_V[is_rare_V].sum().reshape(1)])
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) < 2:
        return 1.0
    statistic = ((observed - expected).square() / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))
