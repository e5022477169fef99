"""The policy: a causal language model of two layers, with random weights."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tinygrpo.task import BOS, EOS, PAD, VOCAB_SIZE


def build_model(seed=0):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return Qwen2ForCausalLM(config)
