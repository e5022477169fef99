"""verl's rollouts, batches and rewards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.verl.reports import put_groups
from rlcanary.adapters.verl.runs import Runs, silent
from rlcanary.adapters.verl.workers.agents import Server, agent_worker, numbered, scored
from rlcanary.adapters.verl.workers.run_config import run_config
from rlcanary.adapters.verl.workers.transfer_queue import stored
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, Group
    from rlcanary.contract.records.preparation import Answer
    from rlcanary.contract.state import Item

# The dataset of each kind and format of an answer, by which verl chooses the verifier.
SOURCES = {
    ("number", "hash"): "openai/gsm8k",
    ("math", "boxed"): "lighteval/MATH",
    ("math", "line"): "math_dapo",
    ("number", "line"): "math_dapo",
    ("exact", "tag"): "searchR1_nq",
}


class Rollouts(Runs):
    """From the items of a step to its batch."""

    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        import torch
        from verl import DataProto

        def score(ground_truth: int, solution_str: str, **_: Any) -> float | None:
            return items[ground_truth].reward(solution_str)

        # A response is the number of its text.
        ids_B1, n_rows = torch.arange(len(completions)).unsqueeze(1), len(completions)
        tensors = {"prompts": ids_B1, "responses": ids_B1, "attention_mask": torch.ones(n_rows, 2, dtype=torch.long)}
        rewards = scored(
            DataProto.from_dict(tensors=tensors, non_tensors=numbered(n_rows)),
            lambda ids, **_: completions[int(ids[0])],
            score,
            run_config(reward__custom_reward_function={"path": "given"}),
        )
        return torch.tensor([math.nan if reward is None else reward for reward in rewards])

    def verify(self, answer: Answer) -> bool:
        from verl.utils.reward_score import default_compute_score

        source = SOURCES.get((answer.kind, answer.format))
        if source is None:
            raise NotProvided("default_compute_score has no such verifier")
        truth = {"target": answer.reference} if source.startswith("searchR1") else answer.reference
        with quiet(), silent():
            result = default_compute_score(source, answer.text, truth)
        return bool((result["score"] if isinstance(result, dict) else result) == 1)

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        """Run the single-turn agent loop on prompts whose template gives their ids."""
        from verl.utils import tensordict_utils

        wanted = Sampling(**sampling)
        if wanted.repetition_penalty != 1 or wanted.stop_sequences:
            raise NotProvided("the agent loop worker sets neither stop texts nor a repetition penalty")
        config = run_config(
            actor_rollout_ref__rollout={
                **{"name": "vllm", "n": wanted.n, "temperature": wanted.temperature, "top_p": wanted.top_p},
                **{"top_k": wanted.top_k or -1, "response_length": wanted.max_new_tokens},
                "prompt_length": max(len(item.prompt_ids) for item in items),
                "calculate_log_probs": wanted.logprobs is not None,
            },
            reward__custom_reward_function={"path": "given"},
        )
        batch = {
            "uid": [str(number) for number in range(len(items))],
            "index": list(range(len(items))),
            "raw_prompt": [[{"role": "user", "content": str(number)}] for number in range(len(items))],
            "data_source": ["any"] * len(items),
            "reward_model": [{"ground_truth": number} for number in range(len(items))],
        }

        def score(ground_truth: int, solution_str: str, **_: Any) -> float | None:
            return items[ground_truth].reward(solution_str)

        async def run() -> None:
            server = Server(engine, wanted.max_new_tokens, {"eos_token_ids": wanted.eos_token_ids})
            tokenizer = Templated(engine.tokenizer, [list(item.prompt_ids) for item in items])
            worker = agent_worker(config, tokenizer, server, score)
            data = tensordict_utils.get_tensordict(batch)
            tensordict_utils.assign_non_tensor_data(data, "global_steps", 1)
            await worker.generate_sequences(data)
            await asyncio.gather(*worker.background_tasks)
            if server.has_marks:
                raise NotProvided("a TokenOutput has no marks of what was sampled")

        with stored() as store, quiet(), silent(), unhurried():
            asyncio.run(run())
            finished = [number for number in range(len(items)) if store.tags[str(number)]["status"] == "finished"]
            return [
                group_of(items[number], [store.rows[f"{number}_{each}_0"] for each in range(wanted.n)], wanted)
                for number in finished
            ]

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        """Write the groups into the store as finished rollouts, read them as the trainer does, and pad them."""
        from rlcanary.contract.records.reporting import RolloutBatch

        if any(group.ref_logprobs is not None for group in groups):
            raise NotProvided("logprobs of the reference are computed behind the batch")
        if len({each.logprobs is None for group in groups for each in group.completions}) > 1:
            raise NotProvided("with calculate_log_probs all completions have logprobs, otherwise none")
        with stored() as store, quiet():
            rows = put_groups(store, RolloutBatch(groups))
            data = store.kv_batch_get(rows.keys, rows.partition_id)
        return collated(data, groups, pad_token_id)


class Templated:
    """A tokenizer whose chat template gives the ids of a numbered prompt."""

    def __init__(self, tokenizer: Any, prompts: list[list[int]]) -> None:
        self.tokenizer, self.prompts = tokenizer, prompts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def apply_chat_template(self, messages: list[Mapping[str, Any]], **_: Any) -> list[int]:
        return self.prompts[int(messages[-1]["content"])]


def group_of(item: Item, rows: list[Mapping[str, Any]], sampling: Sampling) -> Group:
    """Read a group back from its rows. A response that is as long as the limit counts as truncated, as in verl's metrics."""
    from rlcanary.contract.batch import Completion, Group

    completions = []
    for row in rows:
        ids, mask = row["responses"].tolist(), row["response_mask"].bool().tolist()
        logprobs = row["rollout_log_probs"].tolist() if "rollout_log_probs" in row else None
        reason = "length" if len(ids) == sampling.max_new_tokens else "stop"
        completions.append(Completion(ids, logprobs, reason, sampled=None if all(mask) else mask))
    rewards = [float(row["rm_scores"].sum()) if "rm_scores" in row else math.nan for row in rows]
    version = min(row["extra_fields"]["min_global_steps"] for row in rows)
    return Group(rows[0]["prompts"].tolist(), completions, rewards, item_id=item.id, policy_version=version)


@contextmanager
def unhurried() -> Iterator[None]:
    """Have a client ask again for what was interrupted without its second of patience."""
    from verl.workers.rollout import llm_server

    before = llm_server.asyncio
    llm_server.asyncio = SimpleNamespace(gather=asyncio.gather, sleep=lambda _: asyncio.sleep(0))
    try:
        yield
    finally:
        llm_server.asyncio = before


def collated(data: Any, groups: list[Group], pad_token_id: int) -> CollatedBatch:
    """Pad the nested tensors of a batch."""
    import torch

    from rlcanary.contract.batch import CollatedBatch

    def padded(name: str, value: float) -> Tensor:
        values: Tensor = torch.nested.to_padded_tensor(data[name], value)
        return values

    lengths_B, starts_B = (data[name].offsets().diff() for name in ("input_ids", "prompts"))
    input_ids_BS, sizes = padded("input_ids", pad_token_id), [len(group.completions) for group in groups]
    versions = [row["min_global_steps"] for row in list(data["extra_fields"])]
    return CollatedBatch(
        input_ids=input_ids_BS,
        attention_mask=torch.arange(input_ids_BS.shape[1]) < lengths_B.unsqueeze(1),
        position_ids=padded("position_ids", 0),
        completion_starts=starts_B,
        completion_ids=padded("responses", pad_token_id),
        completion_mask=padded("response_mask", 0).bool(),
        rewards=torch.stack([row.sum() for row in data["rm_scores"].unbind()]),
        group_ids=torch.tensor([int(uid) for uid in list(data["uid"])]),
        old_logprobs=padded("rollout_log_probs", torch.nan) if "rollout_log_probs" in data else None,
        policy_versions=torch.tensor(versions),
        item_ids=[group.item_id for group, size in zip(groups, sizes, strict=True) for _ in range(size)],
    )
