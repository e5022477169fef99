"""Behind a weight sync the engine holds what the trainer trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlcanary.live.findings import Finding

Held = Mapping[str, Any] | Tensor
PROBES = 8
# Logits are rounded in proportion to their size, and so are differences of logprobs: in parts of 1 + |logprob|, those of an
# engine in bfloat16 are about 0.01 in the mean of a sharp policy, and seldom above 1/16 in the mean of eight tokens.
OF_HALF_PRECISION, OF_THE_SAME_PRECISION = 1 / 16, 1 / 256
# An engine that is nearer than this behind the first sync has the trainer's precision.
SAME = 1 / 1024


class Syncs:
    """The evidence on the weight syncs of a run so far: how far the engine was away behind the first one."""

    def __init__(self) -> None:
        self._at_start: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what is known so far, in plain values."""
        return {"at_start": self._at_start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what was known before."""
        self._at_start = state["at_start"]

    def judge(self, trained: Held, held: Held, allowed: float | None) -> Iterator[Finding]:
        """Compare weights by name, or the logprobs of probe tokens, see `Audit.synced`."""
        if isinstance(trained, Mapping) and isinstance(held, Mapping):
            yield from _weights(trained, held)
            return
        trained_N, held_N = (torch.as_tensor(side).double().cpu() for side in (trained, held))
        away_N = (trained_N - held_N).abs()
        away, relative = float(away_N.mean()), float((away_N / (1 + trained_N.abs())).mean())
        if self._at_start is None:
            self._at_start = relative
        most = OF_THE_SAME_PRECISION if self._at_start < SAME else OF_HALF_PRECISION
        if not (relative <= most if allowed is None else away <= allowed):
            told = (
                f"behind a sync the engine gives {len(away_N)} probe tokens logprobs that are {away:.3g} nats away from the "
                f"trainer's in the mean, {relative:.2g} in parts of 1 + |logprob|, which was {self._at_start:.2g} behind "
                "the first sync: weights, or adapters, are left out"
            )
            yield Finding("sync.probes", told, away)


def _weights(trained: Mapping[str, Any], held: Mapping[str, Any]) -> Iterator[Finding]:
    missing = sorted(set(trained) - set(held))
    if missing:
        yield Finding("sync.missing", f"the engine does not have {_some(missing)}", len(missing))
    unknown = sorted(set(held) - set(trained))
    if unknown:
        yield Finding("sync.unknown", f"the engine has {_some(unknown)}, which the trainer has not", len(unknown))
    differing = [name for name in trained if name in held and not _is_equal(trained[name], held[name])]
    if differing:
        told = f"behind a sync the engine does not hold the trainer's {_some(differing)}"
        yield Finding("sync.weights", told, len(differing))


def _is_equal(trained: Any, held: Any) -> bool:
    """Compare a weight, in the engine's precision, or its fingerprint."""
    if not isinstance(trained, Tensor):
        return bool(trained == held)
    held = held.detach()
    return torch.equal(trained.detach().to(held.device, held.dtype), held)


def probe_logprobs(model: Any) -> Tensor:
    """Return the logprobs [8] that a causal model of transformers gives fixed probe tokens, without any dropout."""
    modes = [(module, module.training) for module in model.modules()]
    ids = torch.arange(1, PROBES + 2, device=model.device).unsqueeze(0) % model.config.vocab_size
    model.eval()
    try:
        with torch.no_grad():
            logits: Tensor = model(input_ids=ids).logits[0, :-1].float()
    finally:
        for module, was_training in modes:
            module.training = was_training
    return logits.log_softmax(dim=-1).gather(-1, ids[0, 1:].unsqueeze(-1)).squeeze(-1)


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} parameters, such as {names[0]}"
