"""The models that checks run on: a rotary Llama, and others that differ from it where training code goes wrong.

Each function makes a tiny model in milliseconds, in evaluation mode. `WORLDS` has them by name, in the order of a run.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from rlcanary import tiny_models
from rlcanary.checks.case import Model
from rlcanary.checks.worlds.training.states import nudged
from rlcanary.checks.worlds.training.tiny_trainer import tiny_policy
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.layers import copied
from rlcanary.errors import UserError
from rlcanary.reference.building import LoraLinear

RANK, ALPHA = 2, 6


def llama() -> Any:
    """A float32 Llama with rotary positions, whose parameters are all away from zero. Every check runs on it."""
    return tiny_policy()


def bfloat16() -> Any:
    """The Llama in bfloat16, whose trainer needs float32 masters outside the model."""
    return tiny_policy().to(torch.bfloat16)


def float16() -> Any:
    """The Llama in float16, whose numbers end at 65504."""
    return tiny_policy().to(torch.float16)


def learned_positions() -> Any:
    """GPT-2: positions are absolute, so that position ids which are missing or off by a shift show."""
    return _copy_of(tiny_models.tiny_gpt2)


def tied_and_biased() -> Any:
    """Qwen2 with one tensor for embedding and output layer, and with biases that are not zero."""
    return nudged(_copy_of(tiny_models.tiny_qwen2, tied=True))


def sliding_window() -> Any:
    """Mistral whose tokens attend to the last four positions only."""
    return _copy_of(tiny_models.tiny_mistral)


def router() -> Any:
    """Mixtral: a router sends each token to two of four experts."""
    return _copy_of(tiny_models.tiny_mixtral)


def capped_logits() -> Any:
    """Gemma 2: behind its output layer the logits are bent, which a product of hidden states and weights leaves out."""
    return _copy_of(tiny_models.tiny_gemma2)


def scaled_logits() -> Any:
    """Granite: behind its output layer the logits are divided by 4, which the same product leaves out."""
    return _copy_of(tiny_models.tiny_granite)


def composite() -> Any:
    """Gemma 4: its configuration holds another one, of the language model, which has the cap of the logits and all sizes."""
    return _copy_of(tiny_models.tiny_gemma4)


def convolution() -> Any:
    """LFM2: a causal convolution over the last three positions, then a layer with attention."""
    return _copy_of(tiny_models.tiny_lfm2)


def lora() -> Any:
    """The Llama, frozen, with low-rank adapters on its attention: B is zero and alpha / rank is 3."""
    model = tiny_policy().requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for layer in model.model.layers:
            for name in ("q_proj", "v_proj", "o_proj"):
                setattr(layer.self_attn, name, LoraLinear(getattr(layer.self_attn, name), RANK, ALPHA))
    return model


def part_frozen() -> Any:
    """The Llama with its embedding and first layer frozen."""
    model = tiny_policy()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def scaled() -> Any:
    """The Llama whose layers scale the output of their MLP by a buffer, as routers and quantised layers have."""
    model = tiny_policy()
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = ScaledLinear
        layer.mlp.down_proj.register_buffer("scale", torch.full((), 1.5))
    return model


def generation_config() -> Any:
    """The Llama with sampling defaults of its own, none of which belongs in a request that does not name it."""
    model = tiny_policy()
    model.generation_config.update(
        do_sample=True,
        temperature=0.6,
        top_k=5,
        top_p=0.8,
        repetition_penalty=1.5,
        min_new_tokens=3,
        max_new_tokens=2,
        eos_token_id=[7, 9],
    )
    return model


def config_dtype() -> Any:
    """The float32 Llama whose config says bfloat16, as that of the checkpoint that it was loaded from."""
    model = tiny_policy()
    model.config.dtype = torch.bfloat16
    return model


WORLDS: dict[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (
        llama,
        learned_positions,
        tied_and_biased,
        sliding_window,
        router,
        capped_logits,
        scaled_logits,
        composite,
        convolution,
        lora,
        part_frozen,
        scaled,
        generation_config,
        config_dtype,
        bfloat16,
        float16,
    )
}


class ScaledLinear(torch.nn.Linear):
    """A linear layer whose output is multiplied by its buffer `scale`."""

    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def models_for(adapter: Adapter, spec: str, wanted: tuple[str, ...]) -> Iterator[Model]:
    """Yield the Llama, the adapter's own architecture if it has one, and the wanted models.

    Args:
        adapter: its `new_model` makes its own architecture.
        spec: its name for `load_adapter`, for programs.
        wanted: names in `WORLDS`.
    """
    yield Model("", llama)
    if getattr(adapter.new_model, "__func__", None) is not Adapter.new_model:
        yield Model("own", partial(adapter.new_model, 0), f"load_adapter({spec!r}).new_model(0)")
    for name, make in WORLDS.items():
        if name in wanted and make is not llama:
            yield Model(name, make)


def chosen(text: str) -> tuple[str, ...]:
    """Read the models of an option: "all", or names with commas between them.

    Raises:
        UserError: there is no model of that name.
    """
    names = tuple(WORLDS) if text == "all" else tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in names if name not in WORLDS]:
        raise UserError(f"there is no world {unknown[0]!r}: give all, or some of {', '.join(WORLDS)}")
    return names


def _copy_of(make: Callable[..., Any], **options: Any) -> Any:
    try:
        return copied(_built(make, **options))
    except ModuleNotFoundError as error:
        raise NotProvided(f"{error.name} is not installed") from error
    except ImportError as error:
        raise NotProvided(f"the installed {error.name} has no such model") from error


@cache
def _built(make: Callable[..., Any], **options: Any) -> Any:
    return make(**options)
