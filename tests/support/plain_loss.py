"""The policy loss in plain Python: floats, a loop over rows and tokens, one formula of the papers after another.

Shares nothing with `rlcanary.reference`. A gradient is the slope of the value. What a definition holds constant is taken at
`start`, the logprobs where the slope is taken, while `logprobs` move.
"""

from dataclasses import dataclass
from math import exp, fsum, inf, log, nan, prod

STEP = 1e-6


def approx_kl(log_ratio, c):
    """KL of the old policy to the new one at a token that the old one drew, from the new one's log-ratio to it."""
    return {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": exp(log_ratio) - 1 - log_ratio}[c.approx_kl_estimator]


@dataclass(frozen=True)
class Token:
    old: float
    ref: float
    sampler: float
    entropy: float
    advantage: float


@dataclass(frozen=True)
class Row:
    """The trained tokens of one completion and the group that it belongs to."""

    group: int
    tokens: list[Token]


def rows_of(batch):
    """A `PolicyBatch` as rows, and its logprobs as one list per row."""
    rows, logprobs = [], []
    for row, is_trained in enumerate(batch.mask.tolist()):
        tokens = []
        places = [place for place, trained in enumerate(is_trained) if trained]
        for place in places:
            per_row = batch.advantages.ndim == 1
            advantage = batch.advantages[row] if per_row else batch.advantages[row, place]
            values = (batch.old_logprobs, batch.ref_logprobs, batch.sampler_logprobs, batch.entropy)
            tokens.append(Token(*(float(value[row, place]) for value in values), float(advantage)))
        rows.append(Row(int(batch.group_ids[row]), tokens))
        logprobs.append([float(batch.logprobs.detach()[row, place]) for place in places])
    return rows, logprobs


def loss(rows, logprobs, start, c):
    kls = [_row_terms(row, *given, c)[1] for row, *given in zip(rows, logprobs, start, strict=True)]
    least = least_entropy(rows, c)
    bonus = [[token.entropy for token in row.tokens if token.entropy >= least] for row in rows]
    total = policy_loss(rows, logprobs, start, c)
    total += aggregate(rows, kls, c if c.kl_aggregation is None else c.replace(aggregation=c.kl_aggregation))
    if c.entropy_aggregation is not None:
        c = c.replace(aggregation=c.entropy_aggregation)
    return total - c.entropy_coef * aggregate(rows, bonus, c)


def policy_loss(rows, logprobs, start, c):
    """The loss without its KL and its entropy bonus."""
    policy = [_row_terms(row, *given, c)[0] for row, *given in zip(rows, logprobs, start, strict=True)]
    least = least_entropy(rows, c)
    policy = [
        [term if token.entropy >= least else 0.0 for term, token in zip(terms, row.tokens, strict=True)]
        for terms, row in zip(policy, rows, strict=True)
    ]
    return aggregate(rows, policy, c)


def least_entropy(rows, c):
    """The entropy from which on a token has a policy loss and a bonus."""
    if c.top_entropy is None:
        return -inf
    return quantile([token.entropy for row in rows for token in row.tokens], 1 - c.top_entropy)


def quantile(values, share):
    """Between the two values at the places around share × (n - 1), in proportion."""
    ordered, place = sorted(values), share * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below]) if values else nan


def gradient(rows, logprobs, c):
    """The slope of the loss in each logprob, one list per row."""

    def moved(row, place, step):
        changed = [list(values) for values in logprobs]
        changed[row][place] += step
        return loss(rows, changed, logprobs, c)

    return [
        [(moved(row, place, STEP) - moved(row, place, -STEP)) / (2 * STEP) for place in range(len(values))]
        for row, values in enumerate(logprobs)
    ]


def aggregate(rows, terms, c):
    """One number from a list of token values per row."""
    sums = [fsum(values) for values in terms]
    means = [fsum(values) / len(values) for values in terms if values]
    nonempty = sum(bool(values) for values in terms)
    match c.aggregation:
        case "token_mean":
            return fsum(sums) / max(sum(len(values) for values in terms), 1)
        case "sequence_mean":
            return fsum(means) / len(rows)
        case "sequence_mean_nonempty":
            return fsum(means) / max(nonempty, 1)
        case "sequence_sum":
            return fsum(sums) / len(rows)
        case "sequence_sum_nonempty":
            return fsum(sums) / max(nonempty, 1)
        case "constant":
            return fsum(sums) / (len(rows) * c.aggregation_constant)
        case "group_token_mean":
            groups = {}
            for row, values in zip(rows, terms, strict=True):
                groups.setdefault(row.group, []).extend(values)
            return fsum(fsum(values) / max(len(values), 1) for values in groups.values()) / len(groups)


def ratios(row, logprobs, c):
    """Of each token: its own ratio, or the geometric mean of the row's."""
    if c.ratio_level == "token" or not logprobs:
        return [own_ratio(logprob, token, c) for logprob, token in zip(logprobs, row.tokens, strict=True)]
    mean = fsum(logprob - token.old for logprob, token in zip(logprobs, row.tokens, strict=True)) / len(logprobs)
    return [exp(clamp(mean, c.log_ratio_clamp))] * len(logprobs)


def own_ratio(logprob, token, c):
    return exp(clamp(logprob - token.old, c.log_ratio_clamp))


def _row_terms(row, logprobs, start, c):
    """The losses of the row's tokens, and their KL terms."""
    terms, kls = [], []
    now = ratios(row, logprobs, c)
    given = zip(row.tokens, logprobs, start, now, ratios(row, start, c), strict=True)
    for token, logprob, begun, ratio, ratio_begun in given:
        match c.objective:
            case "cispo":
                term = -clip(ratio_begun, token, c) * token.advantage * logprob
            case "reinforce":
                term = -token.advantage * logprob
            case "sapo":
                term = -soft_gate(ratio, token.advantage, c) * token.advantage
            case "gmpo":
                term = -token.advantage * geometric_mean(row, now, token.advantage, c)
            case "clip":
                term = -clipped_objective(ratio, token, c)
        if is_off_policy(row, start, token.advantage, c):
            term = 0.0
        terms.append(term * correction(token, row, c))
        is_term = c.kl_coef and c.kl_placement == "loss"
        kls.append(c.kl_coef * kl(logprob, begun, token, c) if is_term else 0.0)
    return terms, kls


def bounds(token, c):
    """The bounds of the ratio; dynamic ones by bisection, where (ratio - 1) × ratio × old probability is the distance."""
    if c.clip_bounds == "fixed":
        return (-inf if c.clip_low is None else 1 - c.clip_low), (inf if c.clip_high is None else 1 + c.clip_high)

    def where(distance, low, high):
        for _ in range(200):
            middle = (low + high) / 2
            is_below = (middle - 1) * middle * exp(token.old) < distance
            low, high = (middle, high) if is_below else (low, middle)
        return low

    # Below a half the distance shrinks again.
    low = -inf if c.clip_low is None else where(-c.clip_low, 0.5, 1.0)
    return low, (inf if c.clip_high is None else where(c.clip_high, 1.0, 1e6))


def clip(ratio, token, c):
    low, high = bounds(token, c)
    return min(max(ratio, low), high)


def clipped_objective(ratio, token, c):
    """What PPO maximises (1707.06347, eq. 7), with the floor of dual clip (1912.09729, eq. 5)."""
    advantage = token.advantage
    value = min(ratio * advantage, clip(ratio, token, c) * advantage)
    if c.dual_clip is not None and advantage < 0:
        value = max(value, c.dual_clip * advantage)
    return value


def soft_gate(ratio, advantage, c):
    """What SAPO multiplies the advantage by (2511.20347)."""
    temperature = c.sapo_temperature_positive if advantage > 0 else c.sapo_temperature_negative
    return 4 / temperature / (1 + exp(-temperature * (ratio - 1)))


def geometric_mean(row, every_ratio, advantage, c):
    """The product of the row's clipped ratios to the power of one over their number (2507.20673)."""

    def held(ratio, token):
        low, high = bounds(token, c)
        if token.advantage > 0:
            return min(ratio, high)
        return min(max(ratio, low), inf if c.dual_clip is None else c.dual_clip)

    factors = [held(ratio, token) for token, ratio in zip(row.tokens, every_ratio, strict=True)]
    return prod(factors) ** (1 / len(factors)) if advantage else 1.0


def is_off_policy(row, start, advantage, c):
    """Whether the row has drifted too far from what sampled it to learn from a bad outcome (DeepSeek-V3.2)."""
    if c.off_policy_mask is None or advantage >= 0:
        return False
    is_corrected = c.importance_level != "none"
    gaps = [(each.sampler if is_corrected else each.old) - now for each, now in zip(row.tokens, start, strict=True)]
    return fsum(gaps) / len(gaps) > c.off_policy_mask


def correction(token, row, c):
    """The weight for a sampler that is not the trainer."""
    if c.importance_level == "none":
        return 1.0
    tokens = [token] if c.importance_level == "token" else row.tokens
    weight = prod(exp(each.old) / exp(each.sampler) for each in tokens)
    if c.importance_mode == "truncate":
        return min(weight, c.importance_high)
    return weight if c.importance_low <= weight <= c.importance_high else 0.0


def kl(logprob, begun, token, c):
    """One token's estimate. The score term is p / p(start): the draw from the start, reweighted to where the policy moved.

    Where the log-ratio is held by its clamp, so is that weight.
    """
    p, q = (logprob, token.ref) if c.kl_direction == "policy_to_reference" else (token.ref, logprob)
    log_ratio = clamp(p - q, c.kl_input_clamp)
    is_held = log_ratio != p - q
    p_over_q = exp(log_ratio)
    estimate = {
        "k1": log(p_over_q),
        "k2": log(p_over_q) ** 2 / 2,
        "k3": 1 / p_over_q - 1 - log(1 / p_over_q),
        "abs": abs(log(p_over_q)),
    }[c.kl_estimator]
    if c.kl_score_term and not is_held:
        estimate *= exp(logprob - begun)
    if c.kl_ratio_weighted:
        estimate *= own_ratio(begun if is_held else logprob, token, c)
    return clamp(estimate, c.kl_output_clamp)


def clamp(value, bound):
    return value if bound is None else min(max(value, -bound), bound)


def metrics(rows, logprobs, c):
    """What the loss logs, as means over all trained tokens."""
    tokens = [
        (token, logprob, ratio)
        for row, values in zip(rows, logprobs, strict=True)
        for token, logprob, ratio in zip(row.tokens, values, ratios(row, values, c), strict=True)
    ]

    def mean(values):
        values = list(values)
        return fsum(values) / len(values) if values else nan

    def is_clipped(ratio, token):
        if c.objective in ("reinforce", "sapo"):
            return False
        if c.objective == "cispo":
            return clip(ratio, token, c) != ratio and token.advantage != 0
        return clipped_objective(ratio, token, c) != ratio * token.advantage

    def is_dual(token):
        """Whether an upper bound of this token is that of dual clip."""
        return c.objective != "cispo" and token.advantage < 0

    every_ratio = [ratio for _, _, ratio in tokens]
    return {
        "clip_fraction": mean(is_clipped(ratio, token) for token, _, ratio in tokens),
        "clip_fraction_low": mean(is_clipped(ratio, token) and ratio < 1 for token, _, ratio in tokens),
        "clip_fraction_high": mean(
            is_clipped(ratio, token) and ratio > 1 and not is_dual(token) for token, _, ratio in tokens
        ),
        "dual_clip_fraction": mean(
            is_clipped(ratio, token) and ratio > 1 and is_dual(token) for token, _, ratio in tokens
        ),
        "logprob": mean(logprob for _, logprob, _ in tokens),
        "old_logprob": mean(token.old for token, _, _ in tokens),
        "ref_logprob": mean(token.ref for token, _, _ in tokens),
        "sampler_logprob": mean(token.sampler for token, _, _ in tokens),
        "ratio_mean": mean(every_ratio),
        "ratio_min": min(every_ratio, default=nan),
        "ratio_max": max(every_ratio, default=nan),
        "kl": mean(kl(logprob, logprob, token, c) for token, logprob, _ in tokens),
        "entropy": mean(token.entropy for token, _, _ in tokens),
        "approx_kl": mean(approx_kl(logprob - token.old, c) for token, logprob, _ in tokens),
        "policy_loss": policy_loss(rows, logprobs, logprobs, c) if tokens else nan,
        "mult_prob_error": mean(exp(abs(token.old - token.sampler)) for token, _, _ in tokens),
    }
