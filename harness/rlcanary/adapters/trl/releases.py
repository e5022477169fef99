"""Differences between releases of TRL, each found by what the installed one has, never by its number."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rlcanary.adapters.frameworks import has_part, part
from rlcanary.contract.declining import NotProvided

__all__ = ["has_part", "part"]

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def packages_as_flags() -> Iterator[None]:
    """Let imports of the block take transformers' answer whether a package is installed for the bool that it once was."""
    from transformers.utils import import_utils

    class Answer(tuple[bool, Any]):
        def __bool__(self) -> bool:
            return bool(self[0])

    find = import_utils._is_package_available

    def found(name: str, return_version: bool = False) -> Any:
        answer = find(name, return_version)
        return Answer(answer) if isinstance(answer, tuple) and not return_version else answer

    with patch.object(import_utils, "_is_package_available", found):
        yield


@contextmanager
def loading_reference(load: Callable[..., Any]) -> Iterator[None]:
    """Have trainers that are constructed in the block load their reference model by this function."""
    module = "trl.trainer.grpo_trainer"
    if has_part(f"{module}:create_model_from_path"):
        with patch(f"{module}.create_model_from_path", load):
            yield
        return
    # Older ones look up the class that the configuration of the policy's files names.
    named = SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(architectures=["Given"]))
    given = SimpleNamespace(Given=SimpleNamespace(from_pretrained=load))
    with patch(f"{module}.AutoConfig", named), patch(f"{module}.transformers", given):
        yield


def restore_attributes(model: Any) -> None:
    """Give a model what transformers gave each one when trainers without a `rollout_func` were written."""
    if not has_rollout_func() and not hasattr(model, "warnings_issued"):
        model.warnings_issued = {}


def has_rollout_func() -> bool:
    """Tell whether the trainer takes completions from a function; older ones have those of their own generation alone."""
    return "rollout_func" in parameters(part("trl:GRPOTrainer").__init__)


def require_rollout_func() -> None:
    """Decline what needs given completions of a trainer that has none but its own.

    Raises:
        NotProvided: it has none but its own.
    """
    if not has_rollout_func():
        raise NotProvided("this release of TRL takes completions from its own generation alone")


def parameters(function: Any) -> list[str]:
    """Return the names of a function's parameters."""
    return list(inspect.signature(function).parameters)


def use_tokenizer(trainer: Any, tokenizer: Any) -> None:
    """Give a trainer another tokenizer. Older ones keep no tokenizer, but two of its ids."""
    trainer.processing_class = tokenizer
    if hasattr(trainer, "_tokenizer"):
        trainer._tokenizer = tokenizer
    else:
        trainer.eos_token_id, trainer.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id


def use_padding(trainer: Any, pad_token_id: int) -> None:
    """Give a trainer another padding id."""
    if hasattr(trainer, "_tokenizer"):
        trainer._tokenizer.pad_token_id = pad_token_id
    else:
        trainer.pad_token_id = pad_token_id


def use_ends(trainer: Any, eos_token_ids: Sequence[int]) -> None:
    """Give a trainer other ids that end a completion. Older ones know one, which is the first."""
    ends = list(eos_token_ids)
    if hasattr(trainer, "eos_token_ids"):
        trainer.eos_token_ids = ends
    elif hasattr(trainer, "_tokenizer"):
        trainer._tokenizer.eos_token_id = ends[0] if ends else None
    else:
        trainer.eos_token_id = ends[0] if ends else -1


def single_turn(trainer: Any, prompts: list[list[int]], count: int, images: Any = None, fields: Any = None) -> Any:
    """Have a trainer answer prompts, each given as often as it has completions -> ids and logprobs."""
    if not hasattr(trainer, "_generate_single_turn"):
        raise NotProvided("this release of TRL has generation and scoring in one function")
    generate = trainer._generate_single_turn
    if "num_generations" in parameters(generate):
        return generate(prompts, images, fields or {}, count)
    trainer.num_generations = trainer.num_generations_eval = count
    return generate(prompts, images, fields or {})


def scores(trainer: Any, logprobs: Tensor, entropies: Tensor | None) -> tuple[Any, ...]:
    """Return what a trainer's forward pass of a batch returns: newer ones have the loss of a router, too."""
    has_router = "compute_aux_loss" in parameters(type(trainer)._get_per_token_logps_and_entropies)
    return (logprobs, entropies, None) if has_router else (logprobs, entropies)


def fused(model: Any, **options: Any) -> Any:
    """Patch a model's head as the constructor of a trainer does. Older ones take models as they are."""
    if has_part("trl.trainer.utils:add_fused_lm_head"):
        part("trl.trainer.utils:add_fused_lm_head")(model, **options)
    return model


def scores_by_triton_alone() -> bool:
    """Tell whether TRL's head is a kernel of Triton without a variant for the CPU, before TRL is imported."""
    spec = importlib.util.find_spec("trl")
    folders = (spec.submodule_search_locations or []) if spec else []
    kernels = [Path(folder, "kernels", "chunked_logprob.py") for folder in folders]
    return any(each.is_file() and "_use_triton" not in each.read_text() for each in kernels)


def require_threads() -> None:
    """Decline ranks that are threads where kernels are interpreted, which takes one thread.

    Raises:
        NotProvided: they are interpreted.
    """
    if scores_by_triton_alone():
        raise NotProvided("the head of this release is a Triton kernel, whose interpreter runs in one thread")


def knows_loss(kind: str, trainer: str = "trl:DPOTrainer") -> bool:
    """Tell whether a trainer, given as `module:name`, computes a loss of this name, which no configuration checks."""
    return f'"{kind}"' in inspect.getsource(part(trainer)._compute_loss)
