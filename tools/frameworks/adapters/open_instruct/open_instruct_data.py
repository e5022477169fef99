"""open-instruct's datasets: their preparation, their order, and conversations as token ids."""

from __future__ import annotations

import json
import os
import queue
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import open_instruct_run as run
from open_instruct_objective import Objective

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.records.preparation import PreparedData, PreparedRow

if TYPE_CHECKING:
    from rlcanary.contract.records.preparation import DataRow, PreparationOptions

UNLIMITED = 1_000_000


class Answering(queue.Queue[Any]):
    """The queue of results where each prompt is answered when its result is asked for.

    Attributes:
        trained: the items whose results were taken, in order.
    """

    def __init__(self, actor: Any) -> None:
        super().__init__()
        self.actor = actor
        self.trained: list[int] = []

    def get(self, *_: Any, **__: Any) -> Any:
        """Answer the prompt that has waited longest; every batch before is trained by then."""
        self.actor._last_consumed_step = self.actor.training_step - 1
        request = self.actor.param_prompt_Q.get_nowait()
        self.trained.append(request.index)
        completions = [Completion([1], [0.0])] * request.generation_config.n
        rewards = [float(number) for number in range(request.generation_config.n)]
        result = run.result_of(Group(request.prompt, completions, rewards), request.index)
        result.model_step = self.actor.training_step
        return result


class Datasets(Objective):
    """From the rows of a dataset to prompts, and the order in which they are sampled."""

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        from open_instruct.data_loader import HFDataLoader, single_example_collator

        with tempfile.TemporaryDirectory() as folder, run.on_cpu():
            loader = HFDataLoader(
                dataset=run.dataset_of([[1]] * n_items),
                batch_size=world_size,
                seed=self.configs().args.seed,
                dp_rank=rank,
                dp_world_size=world_size,
                work_dir=folder,
                collator=single_example_collator,
            )
            loader.reshuffle(epoch=epoch)
            return [int(example["index"]) for example in loader]

    def resumed_order(self, n_items: int, consumed: int, count: int, rank: int, world_size: int) -> list[int]:
        """Stop the loop that prepares data behind so many batches of one prompt, and go on from its saved state."""
        if world_size > 1:
            raise NotProvided("one actor serves all ranks")
        if not consumed:
            raise NotProvided("a checkpoint is written behind an update")
        with tempfile.TemporaryDirectory() as folder, run.on_cpu():
            stopped = self._trained_on(n_items, consumed, folder, None)
            stopped._last_consumed_step = consumed - 1
            resumed = self._trained_on(n_items, consumed + count, folder, stopped.get_state())
        return list(resumed.inference_results_Q.trained)

    def _trained_on(self, n_items: int, steps: int, folder: str, state: Any) -> Any:
        """Run the loop up to this step."""
        configs = self.configs(num_samples_per_prompt_rollout=2, num_unique_prompts_rollout=1)
        actor = run.preparation_actor(configs, run.dataset_of([[1]] * n_items), -1, steps, 1, folder=folder)
        actor.inference_results_Q = Answering(actor)
        if state is not None:
            actor.set_state(state)
        actor._data_preparation_loop()
        return actor

    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        """Run `setup_datasets` on files of JSON lines: one file, or one per dataset where numbers of rows are asked for."""
        from open_instruct import grpo_fast
        from open_instruct.dataset_transformation import (
            GROUND_TRUTHS_KEY,
            INPUT_IDS_PROMPT_KEY,
            VERIFIER_SOURCE_KEY,
            TokenizerConfig,
        )

        if options.system_prompt or options.seed is not None or options.held_out:
            raise NotProvided(
                "open-instruct replaces system prompts, shuffles in its loader, and evaluates on other data"
            )
        if not rows:
            raise NotProvided("a dataset has rows")
        limit = UNLIMITED if options.max_prompt_tokens is None else options.max_prompt_tokens
        names = list(dict.fromkeys(row.dataset for row in rows)) if options.counts else [None]
        with tempfile.TemporaryDirectory() as folder, run.on_cpu(), alone(folder):
            mixer = []
            for number, name in enumerate(names):
                path = Path(folder, f"{number}.jsonl")
                own = [row for row in rows if name is None or row.dataset == name]
                path.write_text("".join(f"{json.dumps(_line(row))}\n" for row in own))
                mixer += [str(path), str(options.counts[name]) if name in options.counts else "1.0"]
            configs = self.configs(
                dataset_mixer_list=mixer,
                dataset_local_cache_dir=folder,
                dataset_skip_cache=True,
                max_prompt_token_length=limit,
                response_length=1,
                pack_length=limit + 1,
            )
            tokenizers = TokenizerConfig(tokenizer_name_or_path="tokenizer")
            vars(tokenizers)["tokenizer"] = tokenizer
            with patch.object(grpo_fast, "visualize_token", lambda *_: None):
                dataset, _ = grpo_fast.setup_datasets(configs.args, tokenizers, tokenizer, configs.streaming, [], True)
            kept = [
                PreparedRow(
                    id=json.loads(row["own_id"]),
                    prompt_ids=row[INPUT_IDS_PROMPT_KEY],
                    reference=row[GROUND_TRUTHS_KEY][0],
                    dataset=row[VERIFIER_SOURCE_KEY][0],
                )
                for row in dataset
            ]
        return PreparedData(kept)

    def render(
        self, messages: list[Mapping[str, Any]], tokenizer: Any, tools: list[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Tokenise a conversation for fine-tuning, where all answers are trained, or the last one alone."""
        from open_instruct import dataset_transformation as data

        answers = [message for message in messages if message["role"] == "assistant"]
        if any("token_ids" in message for message in messages):
            raise NotProvided("open-instruct renders text")
        if not answers or messages[-1]["role"] != "assistant":
            raise NotProvided("a conversation for fine-tuning ends with an answer")
        sampled = [bool(message.get("sampled")) for message in answers]
        if all(sampled):
            transform = getattr(data, "_sft_tulu_tokenize", data.sft_tulu_tokenize_and_truncate_v1)
        elif sampled[-1] and not any(sampled[:-1]):
            transform = data.last_turn_tulu_tokenize_and_truncate_v1
        else:
            raise NotProvided("open-instruct trains all answers, or the last one")
        row: dict[str, Any] = {
            data.DEFAULT_SFT_MESSAGES_KEY: [
                {name: value for name, value in message.items() if name != "sampled"} for message in messages
            ]
        }
        if tools is not None:
            row[data.TOOLS_COLUMN_KEY] = tools
        with run.on_cpu():
            made = transform(row, tokenizer, None)
        ids, labels = made[data.INPUT_IDS_KEY].tolist(), made[data.LABELS_KEY].tolist()
        return ids, [label != data.MASKED_TOKEN_VALUE for label in labels]


def _line(row: DataRow) -> dict[str, Any]:
    from open_instruct.dataset_transformation import DEFAULT_SFT_MESSAGES_KEY, GROUND_TRUTHS_KEY, VERIFIER_SOURCE_KEY

    return {
        "own_id": json.dumps(row.id),
        DEFAULT_SFT_MESSAGES_KEY: list(row.messages),
        GROUND_TRUTHS_KEY: row.reference,
        VERIFIER_SOURCE_KEY: row.dataset,
    }


def alone(folder: str) -> Any:
    """Let the library of datasets work in this process, with its cache in a folder."""
    import contextlib

    import datasets

    stack = contextlib.ExitStack()
    stack.enter_context(patch.dict(os.environ, {"BEAKER_ASSIGNED_CPU_COUNT": "1"}))
    stack.enter_context(patch.object(datasets.config, "HF_DATASETS_CACHE", Path(folder, "cache")))
    return stack
