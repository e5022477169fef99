"""Differences between releases of TRL, each found by what the installed one has, never by its number."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import has_part, part
from rlcanary.contract.declining import NotProvided

__all__ = ["has_part", "part"]

if TYPE_CHECKING:
    from torch import Tensor


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


def knows_loss(kind: str) -> bool:
    """Tell whether `DPOTrainer` computes a loss of this name, which its configuration does not check."""
    return f'"{kind}"' in inspect.getsource(part("trl:DPOTrainer")._compute_loss)
