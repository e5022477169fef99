"""verl's datasets, and the tokens of conversations in fine-tuning and in its agent loops."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest import mock

from rlcanary.adapters.frameworks import has_part, part, quiet
from rlcanary.adapters.verl.runs import silent
from rlcanary.adapters.verl.splitting import Splitting
from rlcanary.adapters.verl.workers.run_config import composed, run_config
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.records.preparation import DataRow, PreparationOptions, PreparedData

# Room for any prompt where there is no limit.
ROOM = 10**6


class Datasets(Splitting):
    """From files to ids."""

    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        """Read the rows as a dataset, in the order of its sampler, and build the prompts as the agent loop does."""
        import pandas

        from rlcanary.contract.records.preparation import PreparedData, PreparedRow

        if options.system_prompt or options.counts or options.held_out:
            raise NotProvided("a dataset has its system prompts, its shares and its validation file of its own")
        columns = {
            "prompt": [list(map(dict, row.messages)) for row in rows],
            "data_source": [row.dataset for row in rows],
            "reward_model": [{"ground_truth": row.reference} for row in rows],
            "extra_info": [{"index": place} for place in range(len(rows))],
        }
        limit = ROOM if options.max_prompt_tokens is None else options.max_prompt_tokens
        with TemporaryDirectory() as folder, cached_in(folder), quiet(), silent():
            path = str(Path(folder, "rows.parquet"))
            pandas.DataFrame(columns).to_parquet(path)
            config = run_config(
                data={
                    **self.data,
                    **{"max_prompt_length": limit, "shuffle": options.seed is not None, "seed": options.seed},
                    "filter_overlong_prompts_workers": None,
                },
                actor_rollout_ref__rollout={"prompt_length": limit},
            )
            dataset = moved("create_rl_dataset")([path], config.data, tokenizer, None)
            read = [dataset[index] for index in moved("create_rl_sampler")(config.data, dataset)]
            prompts = agent_tokens(config, tokenizer, [row["raw_prompt"] for row in read])
        kept = [
            PreparedRow(rows[row["index"]].id, ids, row["reward_model"]["ground_truth"], row["data_source"])
            for row, ids in zip(read, prompts, strict=True)
        ]
        return PreparedData(kept)

    def render(
        self, messages: list[Mapping[str, Any]], tokenizer: Any, tools: list[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Merge sampled ids into a conversation as agent loops do; without them fine-tune on every assistant's turn."""
        plain = [{key: each[key] for key in ("role", "content")} for each in messages]
        answers = [each for each in messages if each["role"] == "assistant"]
        if all("token_ids" in each for each in answers if each.get("sampled")):
            return merged(messages, plain, tokenizer, tools)
        if not all(each.get("sampled") and "token_ids" not in each for each in answers):
            raise NotProvided("fine-tuning trains every turn of the assistant, from its text")
        return fine_tuned(plain, tokenizer, tools)


def moved(name: str) -> Any:
    """Return a function of verl's utilities, which older releases have beside their command."""
    place = f"verl.trainer.ppo.utils:{name}"
    return part(place if has_part(place) else f"verl.trainer.main_ppo:{name}")


def cached_in(folder: str) -> Any:
    """Have the library of datasets keep its copies of files in this folder."""
    import datasets

    return mock.patch.object(datasets.config, "HF_DATASETS_CACHE", Path(folder, "cache"))


def agent_loop(config: Any, tokenizer: Any) -> Any:
    """Make verl's loop of a single turn. It belongs to the running event loop."""
    from verl.experimental.agent_loop import agent_loop as agents
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.utils.dataset.rl_dataset import RLHFDataset

    return SingleTurnAgentLoop(
        trainer_config=agents.DictConfigWrap(config),
        server_manager=None,
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=agents.DictConfigWrap(config.data),
    )


def agent_tokens(config: Any, tokenizer: Any, prompts: list[list[dict[str, Any]]]) -> list[list[int]]:
    """Build the first request of conversations."""

    async def run() -> list[list[int]]:
        loop = agent_loop(config, tokenizer)
        # Older ones have no builder of tokens, and call the template.
        build = getattr(loop, "ct_build_initial_tokens", None) or loop.apply_chat_template
        return [await build(messages) for messages in prompts]

    return asyncio.run(run())


def merged(
    messages: list[Mapping[str, Any]], plain: list[dict[str, Any]], tokenizer: Any, tools: Any
) -> tuple[list[int], list[bool]]:
    """Build the tokens of a conversation turn by turn -> ids, and whether they are trained."""
    config = run_config(actor_rollout_ref__rollout={"prompt_length": ROOM})
    starts = [place for place, each in enumerate(messages) if each.get("sampled")]

    async def run() -> tuple[list[int], list[int]]:
        loop = agent_loop(config, tokenizer)
        if not hasattr(loop, "ct_merge_assistant_token"):
            raise NotProvided("the agent loops of this release merge sampled ids within their run alone")
        merge = getattr(loop, "ct_merge_non_assistant_msg", None) or loop.ct_merge_context_msg  # of 0.10, and before
        first = starts[0] if starts else len(plain)
        ids = await loop.ct_build_initial_tokens(plain[:first], tools=tools)
        mask: list[int] = []
        prompt = len(ids)
        for place, end in zip(starts, [*starts[1:], len(plain)], strict=False):
            result, mask, _ = await loop.ct_merge_assistant_token(ids, list(messages[place]["token_ids"]), mask)
            ids = result.token_ids
            if end > place + 1:
                result, mask, _ = await merge(plain[: place + 1], plain[:end], ids, mask, tools=tools)
                ids = result.token_ids
        return ids, [0] * prompt + mask

    with quiet():
        ids, mask = asyncio.run(run())
    return ids, list(map(bool, mask))


def fine_tuned(plain: list[dict[str, Any]], tokenizer: Any, tools: Any) -> tuple[list[int], list[bool]]:
    """Read a conversation as a row of the dataset for fine-tuning -> ids, and whether they are trained."""
    import pandas
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    with TemporaryDirectory() as folder, quiet(), silent():
        path = str(Path(folder, "rows.parquet"))
        columns = {"messages": [plain]} | ({"tools": [tools]} if tools else {})
        pandas.DataFrame(columns).to_parquet(path)
        row = MultiTurnSFTDataset(path, tokenizer, composed("sft_trainer_engine").data)[0]
    return row["input_ids"].tolist(), row["loss_mask"].bool().tolist()
