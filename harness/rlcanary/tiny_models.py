"""Tiny causal language models and a tokenizer, built locally in milliseconds, so that nothing needs a model hub."""

from __future__ import annotations

from typing import Any

VOCABULARY = 64
PAD_ID, EOS_ID, BOS_ID = 0, 2, 1


def tiny_llama(seed: int = 0, vocabulary: int = VOCABULARY) -> Any:
    """A float32 Llama of two layers with random weights: 32 features, 4 heads that share 2 key-value heads.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=BOS_ID,
        tie_word_embeddings=False,
        # Freshly initialised models are nearly uniform; larger weights make positions and contexts matter.
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.eval()


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
