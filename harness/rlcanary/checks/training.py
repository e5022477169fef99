"""A small trainer for the checks: its models, states and batches.

Snippets import these names, so that a counterexample reads as what was done.
"""

import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.batch import CollatedBatch, Completion, Group
from rlcanary.checks.snippet import Written
from rlcanary.checks.subject import Subject
from rlcanary.contract import Item, NotProvided

# The same length throughout, so that both completions have the same weight under every aggregation.
PAIR = [Group([5, 6, 7], [Completion([8, 9]), Completion([10, 11])], [1.0, 0.0])]
# Uneven prompts and completions, two completions alike that earned different rewards, ids that serve as padding elsewhere.
GROUPS = [
    Group(
        [5, 6],
        [Completion([8, 9, 2]), Completion([10]), Completion([11, 0]), Completion([11, 0])],
        [1.0, 0.0, 0.75, 0.25],
    ),
    Group(
        [13, 14, 15, 16],
        [Completion([17, 18, 19, 20, 2]), Completion([21, 2]), Completion([22]), Completion([23, 24, 25])],
        [0.0, 2.0, 0.0, 1.0],
    ),
]

# What snippets use, and where it is.
NAMES = {
    "tiny_llama": "rlcanary.tiny_models",
    **dict.fromkeys(
        ("decaying", "lead", "named", "nudged", "started", "with_graded_items", "with_items"),
        "rlcanary.checks.training",
    ),
    **dict.fromkeys(("breaking_off", "disturb"), "rlcanary.checks.sync"),
    **dict.fromkeys(
        ("distribution", "gap", "p_value", "sampling", "shortfall", "trainer_logprobs", "wrong_ending"),
        "rlcanary.checks.generation",
    ),
    **dict.fromkeys(("changed", "modes", "random_states", "snapshot"), "rlcanary.checks.evaluation"),
    **dict.fromkeys(("Watch", "declared", "gradients_of"), "rlcanary.checks.updates"),
}


def script(*lines: str) -> list[str]:
    """Lines of a snippet with the imports that they need in front."""
    return [*_imports("\n".join(lines)), *lines]


def build(expression: str, **names: Any) -> Any:
    """The value of an expression, over what snippets import and these names.

    Raises:
        NotProvided: transformers is not installed.
    """
    try:
        exec("\n".join(_imports(expression)), names)
        return eval(expression, names)
    except ModuleNotFoundError as error:
        raise NotProvided(f"{error.name} is not installed") from error


def _imports(code: str) -> list[str]:
    modules: dict[str, list[str]] = {}
    for name, module in NAMES.items():
        if re.search(rf"\b{name}\(", code):
            modules.setdefault(module, []).append(name)
    return [f"from {module} import {', '.join(found)}" for module, found in sorted(modules.items())]


def new_state(
    subject: Subject,
    model: str = "tiny_llama()",
    ref_model: str = "None",
    learning_rate: float = 1e-3,
    dressed: str = "{}",
) -> Written:
    """The adapter's own state to train a model from.

    Args:
        subject: whose `new_state` makes it.
        model: Python that makes the policy.
        ref_model: Python that makes the reference model.
        learning_rate: of its optimizer.
        dressed: Python with {} where the state goes.

    Raises:
        NotProvided: the adapter has no such state, or transformers is not installed.
    """
    expression = dressed.format(f"adapter.new_state({model}, {ref_model}, {learning_rate!r})")
    return Written(build(expression, adapter=subject.adapter), expression, "\n".join(_imports(expression)))


def new_engine(subject: Subject, model: str = "tiny_llama()", dressed: str = "{}") -> Written:
    """The adapter's own engine with a model's weights.

    Args:
        subject: whose `new_engine` makes it.
        model: Python that makes the model.
        dressed: Python with {} where the engine goes.

    Raises:
        NotProvided: the adapter has no such engine, or transformers is not installed.
    """
    expression = dressed.format(f"adapter.new_engine({model})")
    return Written(build(expression, adapter=subject.adapter), expression, "\n".join(_imports(expression)))


def reference_model(subject: Subject, other: bool = True) -> str:
    """Python for a reference model near the policy, or equal to it; none where the conventions have no KL."""
    if subject.conventions.kl_coef == 0:
        return "None"
    return "nudged(tiny_llama())" if other else "tiny_llama()"


def nudged(model: Any, scale: float = 0.05) -> Any:
    """The model with noise on every parameter, so much of the parameter's own size."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random).to(parameter)
            parameter.add_(noise * parameter.norm() / math.sqrt(parameter.numel()) * scale)
    return model


def started(state: Any) -> Any:
    """The state after an update with gradients of one, which are still there."""
    for parameter in state.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    state.scheduler.step()
    return state


def with_items(state: Any) -> Any:
    """The state with prompts to evaluate on, whose rewards tell almost any two texts apart."""
    prompts = ([5, 6, 7], [8, 9, 10, 11, 12])
    return _evaluating(state, [Item(index, prompt, _fingerprint) for index, prompt in enumerate(prompts)])


def with_graded_items(state: Any) -> Any:
    """The state with prompts to evaluate on, whose rewards are 0.75, 0.5, 0.25 and -0.5, whatever the text."""
    return _evaluating(state, [Item(reward, [5, 6], _constant(reward)) for reward in (0.75, 0.5, 0.25, -0.5)])


def _evaluating(state: Any, items: list[Item]) -> Any:
    if hasattr(state, "eval_items"):
        state.eval_items = items
    return state


def _constant(reward: float) -> Callable[[str], float]:
    return lambda text: reward


def _fingerprint(text: str) -> float:
    return zlib.crc32(text.encode()) % 1000 / 1000


def decaying(state: Any) -> Any:
    """The state with a schedule under which update k = 0, 1, 2, … has 1 / (k + 1) of the learning rate."""
    state.scheduler = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda k: 1 / (k + 1))
    return state


def sampled(
    subject: Subject, groups: Sequence[Group] = GROUPS, drift: float = 0.0, pad_token_id: int = 0, **layout: Any
) -> CollatedBatch:
    """A batch of completions with the logprobs that `tiny_llama()` gives them at the conventions' temperature.

    Args:
        subject: whose conventions say the temperature.
        groups: what was sampled.
        drift: how far, at most, an older policy's logprobs were from these.
        pad_token_id: stands in the padding.
        layout: options of `reference.make_batch`.
    """
    batch, _ = reference.make_batch(list(groups), pad_token_id, **layout)
    with torch.no_grad():
        logprobs_BT = reference.completion_logprobs(build("tiny_llama()"), batch, subject.conventions.temperature)
    noise_BT = torch.rand(logprobs_BT.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return replace(batch, old_logprobs=logprobs_BT + drift * noise_BT)


def lead(model: Any, batch: CollatedBatch) -> float:
    """By how many nats the first completion of a batch is likelier than the second."""
    with torch.no_grad():
        logprobs_BT = reference.completion_logprobs(model, batch)
    logprobs_B = logprobs_BT.double().nansum(dim=1)
    return float(logprobs_B[0] - logprobs_B[1])


def named(model: Any) -> dict[str, Tensor]:
    """The parameters by name, without what wrappers put in front."""
    return {
        name.replace("_orig_mod.", "").removeprefix("module."): parameter
        for name, parameter in model.named_parameters()
    }
