"""The page on policies: its examples run."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from rlcanary.tiny_models import tiny_chat_tokenizer, tiny_llama

PAGE = (Path(__file__).parents[4] / "docs" / "grpo.md").read_text().partition("## Policies")[2]
SCORING, THREADS, CONVERSATIONS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_examples_run() -> None:
    tokenizer = tiny_chat_tokenizer()
    names: dict[str, Any] = {"model": tiny_llama(vocabulary=len(tokenizer)), "tokenizer": tokenizer}
    exec(SCORING, names)
    for completion, scored in zip(names["group"], names["again"].response, strict=True):
        assert scored.tolist() == pytest.approx(list(completion.logprobs), abs=1e-4)
        assert scored.requires_grad
    exec(THREADS, names)
    exec(CONVERSATIONS, names)
    conversation = asyncio.run(names["play"]())
    assert conversation.score is not None
    assert names["render_chats"]([conversation.messages], tokenizer).masks.full[0].any()
