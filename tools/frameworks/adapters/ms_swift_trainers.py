"""Real trainers of ms-swift on tiny models, whose engine replays completions that the adapter is given."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.trl.trainer.runs import ranked
from rlcanary.adapters.trl.trainer.state import Rollout
from rlcanary.adapters.trl.trainer.trainers import PROMPT, dataset_of, random_states_kept

# Updates of a run: enough that no check comes to the end of its schedule.
UPDATES = 1000
# Ids of the tokenizer, among which are those of all prompts.
IDS = 160_000
# On the CPU in full precision, without a progress bar, without workers that load data; each update logs its metrics.
QUIETLY: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "check_model": False,
    "dataloader_num_workers": 0,
    "dataloader_persistent_workers": False,
    # It changes no number, and the checks read gradients in a way that its default variant forbids.
    "gradient_checkpointing": False,
}
SIZES = {"max_completion_length": 16, "num_generations": 2, "per_device_train_batch_size": 2}
# Defaults of `RLHFArguments` for GRPO, by which `swift rlhf` fills what `GRPOConfig` leaves open.
GRPO: dict[str, Any] = {
    "beta": 0.04,
    "loss_type": "grpo",
    "scale_rewards": "group",
    "kl_in_reward": False,
    "gradient_accumulation_steps": 1,
    "remove_unused_columns": False,
}


def grpo_trainer(
    settings: dict[str, Any],
    model: Any = None,
    ref_model: Any = None,
    *,
    rows: Sequence[dict[str, Any]] | None = None,
    tokenizer: Any = None,
    replays: bool = True,
) -> Any:
    """Construct a `GRPOTrainer` whose engine replays the completions of `Replay`.

    Args:
        settings: of swift's `GRPOConfig`.
        model: the policy, by default the tiny Llama.
        ref_model: the reference model where beta is above zero, by default a copy of the policy.
        rows: the training dataset, in swift's format; by default 64 prompts of one token.
        tokenizer: by default one of words that are numbers.
        replays: whether the engine replays; otherwise it is the trainer's own.
    """
    from swift.rlhf_trainers.arguments import GRPOConfig
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
    from transformers.trainer_callback import PrinterCallback

    from rlcanary.contract.layers import copied
    from rlcanary.tiny_models import tiny_llama

    policy = known(tiny_llama() if model is None else model)
    # A run constructs its trainer once, which sets the random seeds; here many are constructed.
    with quiet(), random_states_kept(), _accelerators_kept():
        args = GRPOConfig(output_dir=_folder().name, **{**QUIETLY, **SIZES, **GRPO, **settings})
        reference = None
        if args.beta:
            base = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
            reference = known(copied(base).eval() if ref_model is None else ref_model).requires_grad_(False)
        trainer = GRPOTrainer(
            model=policy,
            ref_model=reference,
            reward_funcs=[given_reward],
            args=args,
            template=template_of(policy, tokenizer),
            train_dataset=_prompts() if rows is None else dataset_of(rows),
        )
        for callback in list(trainer.callback_handler.callbacks):
            if isinstance(callback, PrinterCallback):
                trainer.remove_callback(callback)
    if replays:
        trainer.engine = Replay(trainer)
    return trainer


def known(model: Any) -> Any:
    """Give a model the description that swift's loader gives each one: a text model of the family of Llama."""
    import torch
    from swift.model import MODEL_MAPPING
    from swift.model.model_meta import ModelInfo

    if not hasattr(model, "model_info"):
        length = getattr(model.config, "max_position_embeddings", None)
        model.model_info = ModelInfo("llama", _folder().name, torch.float32, length, None, None, task_type="causal_lm")
        model.model_meta = MODEL_MAPPING["llama"]
        model.model_dir = _folder().name
    return model


def template_of(model: Any, tokenizer: Any = None, **options: Any) -> Any:
    """Make the template of a run with `use_chat_template=False`: the prompt is the text of the user."""
    from swift.template import get_template

    processor = own_tokenizer(_words() if tokenizer is None else tokenizer)
    processor.model_info, processor.model_meta = model.model_info, model.model_meta
    given = {"use_chat_template": False, "template_type": "default", "max_length": None, **options}
    template = get_template(processor, loss_scale="last_round", truncation_strategy="left", **given)
    template.template_meta.auto_add_bos = False  # the prompts of the checks have theirs
    template.set_mode("train")
    return template


def own_tokenizer(tokenizer: Any) -> Any:
    """Copy a tokenizer so that its special tokens can be changed."""
    own = copy.copy(tokenizer)
    own._special_tokens_map = dict(tokenizer._special_tokens_map)
    return own


@cache
def _words() -> Any:
    """Make a tokenizer of one id per word, as the tiny one is, with ids enough for the prompts of the checks."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"t{index}": index for index in range(3, IDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@contextmanager
def as_rank(rank: int, n_ranks: int) -> Iterator[None]:
    """Have accelerate believe that this process is one of several, and know better behind the block."""
    try:
        with ranked(rank, n_ranks):
            yield
    finally:
        _begin_accelerate()


@contextmanager
def _accelerators_kept() -> Iterator[None]:
    """Give the trainers of before the state of accelerate again, which arguments reset, if the block fails."""
    try:
        yield
    except Exception:
        _begin_accelerate()
        raise


def _begin_accelerate() -> None:
    """Fill the state that all accelerators share."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Make the folder that trainers are constructed with. One that writes is given another."""
    return tempfile.TemporaryDirectory()


@cache
def _prompts() -> Any:
    return dataset_of([row() for _ in range(64)])


def row(prompt: str = PROMPT, **columns: Any) -> dict[str, Any]:
    """Make a row of a dataset in swift's format."""
    return {"messages": [{"role": "user", "content": prompt}], **columns}


def given_reward(_: list[str], given_reward: list[float], **__: Any) -> list[float | None]:
    """Return the rewards that the rows come with; None stands for one that is NaN."""
    return [None if math.isnan(reward) else reward for reward in given_reward]


class Replay:
    """An engine of swift's trainer that returns given completions, by default a token for each prompt."""

    def __init__(self, trainer: Any) -> None:
        self.decode = trainer.template.decode_generate_ids
        self.of_model = trainer.engine
        self.rollout: Rollout | None = None
        self.finish_reasons: list[str | None] | None = None
        self.texts: list[str] | None = None
        self.with_logprobs = False

    def infer(self, requests: list[Any], *_: Any, **__: Any) -> list[Any]:
        """Return swift's `RolloutOutput` of each request."""
        from swift.infer_engine.protocol import RolloutOutput

        ids = [[6]] * len(requests) if self.rollout is None else self.rollout.completion_ids
        assert len(ids) == len(requests), "the requests are not those of the rollout"
        outputs = []
        for number, own in enumerate(ids):
            found: dict[str, Any] = {"response": self._response(number, own)}
            if self.rollout is not None and self.rollout.sampled is not None:
                found |= {"response_token_ids": [own], "response_loss_mask": [self.rollout.sampled[number]]}
            if self.with_logprobs and self.rollout is not None and self.rollout.logprobs is not None:
                kept = self.rollout.sampled[number] if self.rollout.sampled else [1] * len(own)
                logprobs = zip(self.rollout.logprobs[number], kept, strict=True)
                found["rollout_logprobs"] = [[logprob for logprob, is_kept in logprobs if is_kept]]
            outputs.append(RolloutOutput(**found))
        return outputs

    def _response(self, number: int, ids: list[int]) -> Any:
        from swift.infer_engine.protocol import (
            ChatCompletionResponse,
            ChatCompletionResponseChoice,
            ChatMessage,
            UsageInfo,
        )

        text = self.decode(ids) if self.texts is None else self.texts[number]
        reason = "stop" if self.finish_reasons is None else self.finish_reasons[number]
        choice = ChatCompletionResponseChoice(0, ChatMessage("assistant", text), reason, token_ids=list(ids))
        return ChatCompletionResponse("", [choice], UsageInfo(0, len(ids), len(ids)))
