"""Load the policy and its tokenizer from a folder, or build a small one over characters that learns on a CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlcanary.errors import UserError

PAD_ID, EOS_ID = 0, 1

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ message.content }}
{%- if message.role == "assistant" -%}{{ eos_token }}{%- endif -%}
{%- endfor -%}"""


@dataclass(frozen=True)
class ScratchSettings:
    """A Qwen2 with random weights.

    Attributes:
        characters: each is one token.
        hidden_size: features, an even number per head; 32 per head suit vLLM's kernels on CPUs.
        layers: transformer blocks.
        heads: attention heads.
        max_length: positions.
    """

    characters: str = "0123456789+-*= "
    hidden_size: int = 64
    layers: int = 2
    heads: int = 2
    max_length: int = 256

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "max_length"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}, it has to be at least 1")
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size is {self.hidden_size}, it has to be an even multiple of the number of heads, {self.heads}"
            )


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters, which are trained in place of the model's own parameters.

    Attributes:
        rank: rows of A and columns of B.
        alpha: B A is multiplied by alpha / rank.
        targets: last parts of the names of the layers that get adapters; None takes every linear layer but the output one.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise ValueError(f"rank is {self.rank} (at least 1) and alpha {self.alpha} (above 0 and finite)")
        if self.targets is not None and not self.targets:
            raise ValueError("targets is empty: name layers, or leave it out for every linear layer but the output one")


def character_tokenizer(characters: str) -> Any:
    """Build a tokenizer with one id per character.

    Ids 0 and 1 are padding and end of sequence. The chat template is the bare contents.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD_ID, "<eos>": EOS_ID}
    words |= {character: index for index, character in enumerate(dict.fromkeys(characters), len(words))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def scratch_model(settings: ScratchSettings, seed: int) -> Any:
    """Build a float32 Qwen2 in evaluation mode with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=2 + len(dict.fromkeys(settings.characters)),
        hidden_size=settings.hidden_size,
        intermediate_size=2 * settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.max_length,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    return model.eval()


def load_model(settings: ModelSettings, seed: int) -> tuple[Any, Any]:
    """Load the model in evaluation mode and its tokenizer.

    Raises:
        UserError: the folder does not hold a causal language model with a tokenizer.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = getattr(torch, settings.dtype)
    if settings.scratch is not None:
        model, tokenizer = scratch_model(settings.scratch, seed), character_tokenizer(settings.scratch.characters)
        return model.to(dtype), tokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(settings.path, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.path: {settings.path} does not hold a model that loads: {error}") from error
    return model.eval(), tokenizer


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write model and tokenizer in the format that transformers and vLLM read."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def pad_id(tokenizer: Any) -> int:
    """Return the id that fills padding: the tokenizer's, else its end of sequence. An id of 0 is valid."""
    chosen = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if chosen is None:
        raise UserError("the tokenizer has neither a padding nor an end-of-sequence token")
    return int(chosen)


@dataclass(frozen=True)
class ModelSettings:
    """The policy: a folder with a transformers model and its tokenizer, or a model from scratch.

    Attributes:
        path: a local folder; nothing is downloaded.
        scratch: a tiny model over characters with random weights.
        dtype: dtype of the model that computes; the optimizer's master weights are float32 whatever it is.
    """

    path: Path | None = None
    scratch: ScratchSettings | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("give either path or scratch")
        if self.path is not None and not (self.path / "config.json").is_file():
            raise ValueError(f"path is {self.path}, where no model is: it has to be a folder with a config.json")
