"""Tokenizers of the most used chat families, built here: their special tokens and the behaviour of their templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""

# Thoughts are written in the last answer alone, in which they are never missing.
QWEN3 = """\
{%- set asked = namespace(last=-1) -%}
{%- for message in messages if message.role == "user" -%}
{%- set asked.last = messages.index(message) -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content.split("</think>")[-1].lstrip("\\n") if message.role == "assistant" else message.content -%}
{%- set before = message.content.split("</think>")[0] if content != message.content else "" -%}
<|im_start|>{{ "user" if message.role == "tool" else message.role }}
{% if message.role == "assistant" and loop.index0 > asked.last and loop.last -%}
<think>
{{ before.split("<think>")[-1].strip("\\n") }}
</think>

{% endif -%}
{{ "<tool_response>\\n" ~ content ~ "\\n</tool_response>" if message.role == "tool" else content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""

LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start_header_id|>assistant<|end_header_id|>

{% endif -%}"""

# The system prompt stands in the last question, and no header opens an answer.
MISTRAL = """\
{{- bos_token -}}
{%- set system = messages[0].content if messages[0].role == "system" else "" -%}
{%- set asked = messages[1:] if system else messages -%}
{%- for message in asked -%}
{%- if message.role == "user" -%}
[INST] {{ system ~ "\\n\\n" if system and loop.index0 >= asked | length - 2 }}{{ message.content }}[/INST]
{%- elif message.role == "assistant" -%}
{{ " " ~ message.content }}{{ eos_token }}
{%- else -%}
{{ raise_exception("only user and assistant roles are supported") }}
{%- endif -%}
{%- endfor -%}"""

GEMMA = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == "system" -%}{{ raise_exception("system role not supported") }}{%- endif -%}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) -%}
{{ raise_exception("roles must alternate user/assistant/user/assistant") }}
{%- endif -%}
<start_of_turn>{{ "model" if message.role == "assistant" else message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}
<start_of_turn>model
{% endif -%}"""

# Ends with the EOS where no answer is asked for, and leaves out messages of other roles.
PHI3 = """\
{%- for message in messages if message.role in ("system", "user", "assistant") -%}
<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{% else -%}
{{ eos_token }}
{%- endif -%}"""

# Opens the thoughts for the policy, and leaves them out of answers.
DEEPSEEK_R1 = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == "system" -%}
{{ message.content }}
{%- elif message.role == "assistant" -%}
<|Assistant|>{{ message.content.split("</think>")[-1] }}{{ eos_token }}
{%- else -%}
<|User|>{{ message.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|Assistant|><think>
{% endif -%}"""

ZEPHYR = """\
{%- for message in messages -%}
<|{{ message.role }}|>
{{ message.content }}{{ eos_token }}
{% endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{% endif -%}"""

COMMAND_R = """\
{{- bos_token -}}
{%- for message in messages -%}
<|START_OF_TURN_TOKEN|>
{{- "<|CHATBOT_TOKEN|>" if message.role == "assistant" else "<|" ~ message.role | upper ~ "_TOKEN|>" -}}
{{ message.content | trim }}<|END_OF_TURN_TOKEN|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>
{%- endif -%}"""

# The last answer ends otherwise than earlier ones, and its channel is the policy's to write.
GPT_OSS = """\
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}
{{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" -}}
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}"""


@dataclass(frozen=True)
class Family:
    """A chat family.

    Attributes:
        template: its chat template.
        eos: EOS of its tokenizer.
        end: the token that ends an answer.
        special: further special tokens.
        roles: roles that its template writes besides user and assistant.
        appends: its template writes a conversation as it did before, whatever follows.
    """

    template: str
    eos: str
    end: str
    special: tuple[str, ...]
    roles: tuple[str, ...] = ("system", "tool")
    appends: bool = True


IM = ("<|im_start|>", "<|im_end|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
COHERE = ("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|TOOL_TOKEN|>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|endoftext|>")
FAMILIES = {
    "Qwen2.5": Family(CHATML, "<|im_end|>", "<|im_end|>", (*IM, "<|endoftext|>")),
    "ChatML on <|endoftext|>": Family(CHATML, "<|endoftext|>", "<|im_end|>", IM),
    "Qwen3": Family(QWEN3, "<|im_end|>", "<|im_end|>", (*IM, "<|endoftext|>"), appends=False),
    "Llama 3": Family(LLAMA3, "<|end_of_text|>", "<|eot_id|>", HEADERS),
    "Mistral": Family(MISTRAL, "</s>", "</s>", ("[INST]", "[/INST]"), ("system",), appends=False),
    "Gemma": Family(GEMMA, "<eos>", "<end_of_turn>", ("<start_of_turn>", "<end_of_turn>"), ()),
    "Phi-3": Family(
        PHI3, "<|endoftext|>", "<|end|>", ("<|user|>", "<|assistant|>", "<|end|>"), ("system",), appends=False
    ),
    "DeepSeek-R1": Family(
        DEEPSEEK_R1, "<|end_of_sentence|>", "<|end_of_sentence|>", ("<|User|>", "<|Assistant|>"), appends=False
    ),
    "Zephyr": Family(ZEPHYR, "</s>", "</s>", ()),
    "Command R": Family(COMMAND_R, "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", COHERE),
    "gpt-oss": Family(GPT_OSS, "<|return|>", "<|return|>", HARMONY, appends=False),
}


def family_tokenizer(family: Family) -> Any:
    """Build a byte-level tokenizer with the family's special tokens and template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token=family.eos,
        pad_token="<pad>",
        additional_special_tokens=[token for token in family.special if token != family.eos],
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )
