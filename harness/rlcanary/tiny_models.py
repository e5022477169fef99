"""Tiny causal language models and a tokenizer, built locally in milliseconds, so that nothing needs a model hub."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from rlcanary.contract.layers import copied

VOCABULARY = 64
PAD_ID, EOS_ID, BOS_ID = 0, 2, 1

OPENING = """\
{{- bos_token }}
{%- if tools -%}
<|start|>tools
{{ tools | map("tojson") | join("\\n") }}<|end|>
{% endif -%}
"""
TURNS = """\
{%- for message in messages -%}
<|start|>{{ message.role }}
{{ message.content }}<|end|>
{% endfor -%}
"""
# The answers of all tools that a turn called are one turn of the user, as in Qwen's templates.
TURNS_WITH_MERGED_TOOLS = """\
{%- for message in messages -%}
{%- if message.role != "tool" -%}
<|start|>{{ message.role }}
{{ message.content }}<|end|>
{% else -%}
{%- if loop.first or loop.previtem.role != "tool" -%}
<|start|>user
{% endif -%}
<tool>{{ message.content }}</tool>
{%- if loop.last or loop.nextitem.role != "tool" -%}
<|end|>
{% endif -%}
{% endif -%}
{% endfor -%}
"""
# Contents without outer blanks, as in Llama's templates, and thoughts in a form of the template's own, as in Qwen's.
TURNS_WITH_REWRITTEN_CONTENTS = """\
{%- for message in messages -%}
{%- set content = message.content | trim -%}
{%- if message.role == "assistant" and "</think>" in content -%}
{%- set thoughts, answer = content.split("</think>")[0].split("<think>")[-1], content.split("</think>")[-1] -%}
{%- set content = "<think>\n" ~ (thoughts | trim) ~ "\n</think>\n\n" ~ (answer | trim) -%}
{%- endif -%}
<|start|>{{ message.role }}
{{ content }}<|end|>
{% endfor -%}
"""
GENERATION_PROMPT = """\
{%- if add_generation_prompt -%}
<|start|>assistant
{% endif -%}"""


def tiny_llama(seed: int = 0, vocabulary: int = VOCABULARY, *, tied: bool = False, dropout: float = 0.0) -> Any:
    """A float32 Llama of two layers with random weights: 32 features, 4 heads that share 2 key-value heads.

    Args:
        seed: seed of the weights.
        vocabulary: number of ids.
        tied: the output layer shares the weights of the embedding.
        dropout: the share of attention that is dropped in training mode; the model comes in evaluation mode.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    return copied(_llama(seed, vocabulary, tied, dropout))


@cache
def _llama(seed: int, vocabulary: int, tied: bool, dropout: float) -> Any:
    """The one model of these options, which is copied in less than half the time that it takes to make it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = _sizes() | {"vocab_size": vocabulary}
    return _seeded(LlamaForCausalLM, LlamaConfig(**sizes, tie_word_embeddings=tied, attention_dropout=dropout), seed)


def tiny_tokenizer() -> Any:
    """A tokenizer of one id per word `t0` … `t63`, where ids 0, 1 and 2 are padding, BOS and EOS.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID}
    words |= {f"t{index}": index for index in range(VOCABULARY) if index not in words.values()}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )


def tiny_chat_tokenizer(merges_tools: bool = False, *, rewrites_contents: bool = False) -> Any:
    """A byte-level BPE tokenizer with a chat template; ids 0, 1, 2 and 3 are padding, BOS, end of turn and start of turn.

    The template writes BOS, a turn with the tools where there are any, the roles as they are (system, user, assistant,
    tool) and a line break behind each end of turn; `encode` adds a BOS of its own. Words such as "hello" are merged into
    one id, so that "hello" sampled letter by letter has other ids when its text is encoded again.

    Args:
        merges_tools: the template writes consecutive messages of tools as one turn of the user, each in a tag of its own.
        rewrites_contents: the template trims contents, and writes the thoughts before an assistant's `</think>` anew.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<|end|>": EOS_ID, "<|start|>": 3}
    vocabulary = special | {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 4)}
    merges = []
    for word in ("system", "user", "assistant", "tool", "hello", "four", "yes"):
        for length in range(2, len(word) + 1):
            merges.append((word[: length - 1], word[length - 1]))
            vocabulary.setdefault(word[:length], len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    turns = TURNS_WITH_MERGED_TOOLS if merges_tools else TURNS_WITH_REWRITTEN_CONTENTS if rewrites_contents else TURNS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<|end|>",
        additional_special_tokens=["<|start|>"],
        chat_template=OPENING + turns + GENERATION_PROMPT,
    )


def tiny_qwen2(seed: int = 0, vocabulary: int = VOCABULARY, *, tied: bool = False) -> Any:
    """A float32 Qwen2 of two layers with random weights, whose heads of 32 features vLLM's attention kernels accept.

    Its generation ends after 16 tokens unless told otherwise; the end-of-sequence id can be sampled like any other.
    With `tied` the output layer shares the weights of the embedding.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=BOS_ID,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return _bounded(Qwen2ForCausalLM, config, seed)


def tiny_gpt2(seed: int = 0, vocabulary: int = VOCABULARY) -> Any:
    """A float32 GPT-2 of two layers with random weights: learned positions, tied embeddings, no dropout.

    Its generation ends after 16 tokens unless told otherwise; the end-of-sequence id can be sampled like any other.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=BOS_ID,
        initializer_range=0.3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return _bounded(GPT2LMHeadModel, config, seed)


def tiny_value_model(seed: int = 0) -> Any:
    """A float32 GPT-2 of two layers with random weights and a head of one number, the value, in evaluation mode.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    return copied(_value_model(seed))


@cache
def _value_model(seed: int) -> Any:
    from transformers import GPT2Config, GPT2ForTokenClassification

    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    ids = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": BOS_ID}
    config = GPT2Config(**sizes, **ids, num_labels=1, initializer_range=0.3)
    return _seeded(GPT2ForTokenClassification, config, seed)


def tiny_mistral(seed: int = 0) -> Any:
    """A float32 Mistral of two layers with random weights, each with a sliding window of 4 positions.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import MistralConfig, MistralForCausalLM

    return _seeded(MistralForCausalLM, MistralConfig(**_sizes(), sliding_window=4), seed)


def tiny_mixtral(seed: int = 0) -> Any:
    """A float32 Mixtral of two layers with random weights, whose routers choose two of four experts.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    # The faster kernels of the experts have no float64, in which checks compute what they expect.
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    config = MixtralConfig(**_sizes(), **experts, sliding_window=None)
    return _seeded(MixtralForCausalLM, config, seed)


def tiny_lfm2(seed: int = 0) -> Any:
    """A float32 LFM2 with random weights: a causal convolution over three positions, then a layer with attention.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import Lfm2Config, Lfm2ForCausalLM

    # Its warning that the plain convolution is slow means nothing for a tiny model.
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    layers = ["conv", "full_attention"]
    config = Lfm2Config(**_sizes(), layer_types=layers, conv_L_cache=3, block_multiple_of=8, tie_word_embeddings=False)
    return _seeded(Lfm2ForCausalLM, config, seed)


def tiny_gemma2(seed: int = 0) -> Any:
    """A float32 Gemma 2 of two layers with random weights, tied embeddings, and logits that it bends to stay within ±4.

    Its vocabulary fills no block of a power of two: what a kernel puts behind it must not become a logit of -4.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = _sizes() | {"vocab_size": VOCABULARY + 3, "head_dim": 8, "query_pre_attn_scalar": 8}
    return _seeded(Gemma2ForCausalLM, Gemma2Config(**sizes, final_logit_softcapping=4.0), seed)


def tiny_gemma4(seed: int = 0) -> Any:
    """A float32 Gemma 4 of two layers with random weights, built as a vision-language model that has no vision.

    Its configuration holds that of the language model, with the vocabulary, the sizes and the bend of the logits to within
    ±4, and its parameters stand behind `model.language_model`.

    Raises:
        ImportError: transformers is not installed, or has no Gemma 4.
    """
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4TextConfig

    sizes = _sizes() | {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0}
    layers = ["full_attention"] * sizes["num_hidden_layers"]
    text_config = Gemma4TextConfig(**sizes, layer_types=layers, final_logit_softcapping=4.0)
    config = Gemma4Config(text_config=text_config, vision_config=None, audio_config=None)
    return _seeded(Gemma4ForConditionalGeneration, config, seed)


def tiny_granite(seed: int = 0) -> Any:
    """A float32 Granite of two layers with random weights, which divides its logits by 4.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import GraniteConfig, GraniteForCausalLM

    return _seeded(GraniteForCausalLM, GraniteConfig(**_sizes(), logits_scaling=4.0), seed)


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "bos_token_id": BOS_ID,
        # Freshly initialised models are nearly uniform; larger weights make positions and contexts matter.
        "initializer_range": 0.3,
    }


def _bounded(model_class: Any, config: Any, seed: int) -> Any:
    model = _seeded(model_class, config, seed)
    model.generation_config.max_new_tokens = 16
    return model


def _seeded(model_class: Any, config: Any, seed: int) -> Any:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).eval()
