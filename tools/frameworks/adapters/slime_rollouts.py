"""slime's generation, data source, datasets and logs: the engine of the checks stands in for the SGLang router."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import slime_run as run

from rlcanary.adapters.frameworks import part, takes
from rlcanary.contract.adapter import Adapter, Item, NotProvided
from rlcanary.contract.batch import CollatedBatch, Completion, Group
from rlcanary.contract.records.layouts import RowShard
from rlcanary.contract.records.preparation import PreparedData, PreparedRow
from rlcanary.contract.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.records.layouts import Layout
    from rlcanary.contract.records.preparation import DataRow, PreparationOptions
    from rlcanary.contract.records.reporting import EvaluatedItem, RolloutBatch

REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort"}


class Rollouts(Adapter):
    """From items to the rows of a batch."""

    settings: dict[str, Any]
    args: Any

    def samples_of(self, groups: list[Group]) -> list[list[Any]]:
        """Make slime's samples of groups, as its generation leaves them."""
        from slime.utils.types import Sample

        statuses = {reason: Sample.Status(status) for status, reason in REASONS.items()}
        made: list[list[Any]] = []
        for number, group in enumerate(groups):
            made.append([])
            for completion, reward in zip(group.completions, group.rewards, strict=True):
                sampled = completion.sampled
                made[-1].append(
                    Sample(
                        group_index=number,
                        index=sum(map(len, made)),
                        tokens=[*group.prompt_ids, *completion.token_ids],
                        response_length=len(completion.token_ids),
                        reward=float(reward),
                        loss_mask=None if sampled is None else [int(each) for each in sampled],
                        rollout_log_probs=None if completion.logprobs is None else list(completion.logprobs),
                        status=statuses[completion.finish_reason],
                        response=completion.text or "",
                    )
                )
        return made

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        """Run the rollout manager and the actor, and put the rows, which slime never pads, beside each other."""
        import torch

        if any(group.ref_logprobs is not None for group in groups):
            raise NotProvided("the actor computes the reference's logprobs itself")
        scored = [each.logprobs is not None for group in groups for each in group.completions]
        if any(scored) != all(scored):
            raise NotProvided("all samples have rollout logprobs, or none")
        sizes = {len(group.completions) for group in groups}
        if len(sizes) > 1:
            raise NotProvided("n_samples_per_prompt is one number for all prompts")
        samples = [sample for own in self.samples_of(groups) for sample in own]
        args = run.args_of(self.settings)
        args.rollout_batch_size, args.n_samples_per_prompt = len(groups), sizes.pop()
        args.global_batch_size = len(samples)
        with run.on_cpu():
            data = run.rollout_data(args, samples)

        def padded(rows: list[Any], value: Any) -> Any:
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

        lengths = data["response_lengths"]
        totals = torch.tensor(data["total_lengths"])
        tokens = data["tokens"]
        input_ids = padded(tokens, pad_token_id)
        kept = torch.arange(input_ids.shape[1]) < totals.unsqueeze(1)
        logprobs = data.get("rollout_log_probs")
        return CollatedBatch(
            input_ids=input_ids,
            attention_mask=kept,
            position_ids=torch.arange(input_ids.shape[1]).expand(kept.shape) * kept,
            completion_starts=totals - torch.tensor(lengths),
            completion_ids=padded([row[len(row) - n :] for row, n in zip(tokens, lengths, strict=True)], pad_token_id),
            completion_mask=padded(data["loss_masks"], 0).bool(),
            rewards=torch.tensor(data["raw_reward"]),
            group_ids=torch.tensor([sample.group_index for sample in samples]),
            old_logprobs=None if logprobs is None else padded(logprobs, float("nan")),
            item_ids=[group.item_id for group in groups for _ in group.completions],
        )

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        import slime.rollout.sglang_rollout as rollouts
        from slime.utils.types import Sample

        part("slime.rollout.sglang_rollout:_prepare_prompt_ids")  # older trees encode the text of each prompt anew
        request = Sampling(**sampling)
        plain = Sampling(
            temperature=request.temperature,
            top_k=request.top_k,
            max_new_tokens=request.max_new_tokens,
            n=request.n,
            eos_token_ids=request.eos_token_ids,
            stop_sequences=request.stop_sequences,
            skip_special_tokens=request.skip_special_tokens,
        )
        if request != plain:
            raise NotProvided(
                "top_p needs the nucleus of each token, which only SGLang returns; other options are none"
            )
        args = self._sampling_args(request)
        made = [
            [Sample(prompt=str(number), tokens=list(item.prompt_ids)) for _ in range(request.n)]
            for number, item in enumerate(items)
        ]

        async def post(_: str, payload: Mapping[str, Any], **__: Any) -> dict[str, Any]:
            params = payload["sampling_params"]
            wanted = {
                "temperature": params["temperature"],
                "top_k": max(params["top_k"], 0),
                "max_new_tokens": params["max_new_tokens"],
                "n": 1,
                "stop_sequences": tuple(params["stop"] or ()),
                "eos_token_ids": None if params["stop_token_ids"] is None else tuple(params["stop_token_ids"]),
                "skip_special_tokens": params["skip_special_tokens"],
            }
            (completion,) = await engine.agenerate(list(payload["input_ids"]), wanted)
            scores = completion.logprobs
            if scores is None or completion.sampled is not None:
                raise NotProvided("SGLang samples all tokens of an answer, and is asked for logprobs")
            return {
                "text": completion.text,
                "meta_info": {
                    "output_token_logprobs": list(zip(scores, completion.token_ids, completion.token_ids, strict=True)),
                    "finish_reason": {"type": completion.finish_reason},
                },
            }

        async def scored(_: Any, sample: Any) -> float:
            reward = items[int(sample.prompt)].reward(sample.response)
            return float("nan") if reward is None else float(reward)

        async def generated() -> list[list[Any]]:
            state = rollouts.GenerateState(args)
            return await asyncio.gather(
                *(rollouts.generate_and_rm_group(args, group, state.sampling_params.copy()) for group in made)
            )

        type(rollouts.GenerateState)._instances.pop(rollouts.GenerateState, None)
        with (
            run.on_cpu(),
            patch.object(rollouts, "post", post),
            patch.object(rollouts, "async_rm", scored),
            patch.object(rollouts, "load_tokenizer", lambda *_, **__: engine.tokenizer),
            patch.object(rollouts, "load_processor", lambda *_, **__: None),
            patch.dict(vars(rollouts), {"get_rollout_num_engines": lambda _: 1}),
        ):
            groups = asyncio.run(generated())
        return [_group(item, samples) for item, samples in zip(items, groups, strict=True)]

    def _sampling_args(self, request: Sampling) -> Any:
        args = run.args_of(
            {
                **self.settings,
                "rollout_temperature": request.temperature,
                "rollout_top_k": request.top_k or -1,
                "rollout_max_response_len": request.max_new_tokens,
                "rollout_stop": list(request.stop_sequences) or None,
                "rollout_stop_token_ids": None if request.eos_token_ids is None else list(request.eos_token_ids),
                "rollout_skip_special_tokens": request.skip_special_tokens,
                "n_samples_per_prompt": request.n,
            }
        )
        # Options of SGLang, which slime adds to its own with SGLang's defaults.
        args.sglang_server_concurrency, args.sglang_dp_size = 512, 1
        args.sglang_router_ip, args.sglang_router_port = "localhost", 0
        args.rollout_num_gpus = args.rollout_num_gpus_per_engine  # of which older trees count their engines
        return args

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        if world_size > 1:
            raise NotProvided("one data source serves all ranks")
        source = self._source(n_items)
        for _ in range(epoch):
            source.get_samples(n_items)
        return [group[0].label for group in source.get_samples(n_items)]

    def resumed_order(self, n_items: int, consumed: int, count: int, rank: int, world_size: int) -> list[int]:
        if world_size > 1:
            raise NotProvided("one data source serves all ranks")
        with tempfile.TemporaryDirectory() as folder, run.on_cpu():
            stopped = self._source(n_items, folder)
            for _ in range(consumed):
                stopped.get_samples(1)
            stopped.save(0)
            resumed = self._source(n_items, folder)
            resumed.load(0)
        return [resumed.get_samples(1)[0][0].label for _ in range(count)]

    def _source(self, n_items: int, folder: str | None = None) -> Any:
        """Make a data source over numbered samples."""
        from slime.rollout.data_source import RolloutDataSource
        from slime.utils.types import Sample

        before = random.getstate()
        source = RolloutDataSource.__new__(RolloutDataSource)
        args = run.args_of(self.settings)
        args.n_samples_per_prompt, args.save, args.load = 1, folder, folder
        args.rollout_global_dataset = False  # which would read the dataset from a file
        source.__init__(args)  # type: ignore[misc]
        args.rollout_global_dataset = True
        source.dataset = self._dataset([Sample(label=number) for number in range(n_items)], args)  # type: ignore[arg-type]
        if args.rollout_shuffle:
            source.dataset.shuffle(source.epoch_id)
        random.setstate(before)
        return source

    def _dataset(self, samples: list[Any], args: Any) -> Any:
        from slime.utils.data import Dataset

        dataset = Dataset.__new__(Dataset)
        dataset.origin_samples = dataset.samples = samples
        dataset.epoch_id, dataset.seed = -1, args.rollout_seed
        return dataset

    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        from slime.utils.data import Dataset

        prompt_ids = part("slime.rollout.sglang_rollout:_prepare_prompt_ids")
        if options.system_prompt or options.counts or options.held_out:
            raise NotProvided("slime adds no system prompt, and takes or holds out rows by slices of files alone")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "rows.jsonl")
            lines = (
                {"text": list(row.messages), "label": row.reference, "metadata": {"id": row.id, "source": row.dataset}}
                for row in rows
            )
            path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
            with run.on_cpu():
                dataset = Dataset(
                    str(path),
                    tokenizer=tokenizer,
                    processor=None,
                    max_length=options.max_prompt_tokens,
                    label_key="label",
                    apply_chat_template=True,
                    **({} if options.seed is None else {"seed": options.seed}),
                )
                if options.seed is not None:
                    dataset.shuffle(0)
                kept = [
                    PreparedRow(
                        sample.metadata["id"],
                        prompt_ids(sample, tokenizer, None),
                        sample.label,
                        sample.metadata["source"],
                    )
                    for sample in dataset.samples
                ]
        return PreparedData(kept)

    # The logs

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        samples = [sample for own in self.samples_of(batch.groups) for sample in own]
        with run.on_cpu():
            logged = run.rollout_metrics().compute_metrics_from_samples(self.args, samples)
        constant = sum(value for name, value in logged.items() if name.startswith("zero_std/count_"))
        return {
            "length": logged["response_len/mean"],
            "length_min": logged["response_len/min"],
            "length_max": logged["response_len/max"],
            "truncated": logged["truncated_ratio"],
            "no_signal": constant / len(batch.groups),
        }

    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        logs = run.rollout_metrics()
        log = getattr(logs, "log_eval_rollout_data", None) or logs._log_eval_rollout_data
        counts = {len(item.scores) for item in items}
        if len(counts) > 1:
            raise NotProvided("n_samples_per_eval_prompt is one number")
        args = run.args_of({**self.settings, "n_samples_per_eval_prompt": counts.pop(), "log_passrate": True})
        data = {
            name: {"rewards": [float(score) for item in items if item.dataset == name for score in item.scores]}
            for name in dict.fromkeys(item.dataset for item in items)
        }
        with run.on_cpu(), patch.object(logs.logging_utils, "log", lambda *_, **__: None):
            logged = log(0, args, data)
        is_binary = all(score in (0, 1) for item in items for score in item.scores)
        metrics = {}
        for name in data:
            metrics[f"{name}/mean@n"] = logged[f"eval/{name}"]
            if is_binary and f"eval/{name}-pass@{k}" in logged:
                metrics[f"{name}/pass@k"] = float(logged[f"eval/{name}-pass@{k}"])
        return metrics

    # Context parallelism

    def shard_rows(self, batch: CollatedBatch, layout: Layout, rank: int) -> list[RowShard]:
        import torch
        from slime.backends.megatron_utils import cp_utils
        from slime.backends.megatron_utils.data import DataIterator, get_batch

        shifted = part("slime.backends.megatron_utils.loss:_build_shifted_tokens")
        plain = {"qkv_format": "thd", "max_seq_lens": None} if takes(shifted, "qkv_format") else {}
        data = self._rows(batch)  # type: ignore[attr-defined]
        keys = ("tokens", "loss_masks", "total_lengths", "response_lengths")
        iterator = DataIterator(data, micro_batch_indices=[[row] for row in range(len(data["tokens"]))])
        shards = []
        with run.on_cpu(**_ranks(layout, rank)):
            for row, tokens in enumerate(data["tokens"]):
                micro = get_batch(iterator, keys, 1, allgather_cp=False)
                ids, mask = micro["tokens"][0], micro["full_loss_masks"][0].bool()
                total, length = data["total_lengths"][row], data["response_lengths"][row]

                def placed(values: Tensor | None, total: int = total, length: int = length, mask: Any = mask) -> Any:
                    if values is None:
                        return None
                    piece = cp_utils.slice_log_prob_with_cp(values[:length], total, length)
                    result = torch.full(mask.shape, float("nan"))
                    chunk, chunks, logits, _ = cp_utils.get_logits_and_tokens_offset_with_cp(total, length)
                    sizes = [end - start for start, end in logits]
                    for half, values_N in enumerate(piece.split(sizes)):
                        start = half * chunk + logits[half][0] - chunks[half][0]
                        result[start : start + sizes[half]] = values_N
                    return result

                shards.append(
                    RowShard(
                        input_ids=ids,
                        attention_mask=cp_utils.slice_with_cp(torch.ones(total), 0).bool(),
                        position_ids=cp_utils.slice_with_cp(torch.arange(total), 0),
                        labels=shifted(len(ids), ids.device, [tokens], [total], [length], allgather_cp=False, **plain),
                        loss_mask=mask,
                        old_logprobs=placed(None if batch.old_logprobs is None else batch.old_logprobs[row]),
                        ref_logprobs=placed(None if batch.ref_logprobs is None else batch.ref_logprobs[row]),
                    )
                )
        return shards


def _ranks(layout: Layout, rank: int) -> dict[str, int]:
    if layout.context_parallel < 2:
        raise NotProvided("without context parallelism slime cuts nothing")
    return {
        "get_context_parallel_rank": rank,
        "get_context_parallel_world_size": layout.context_parallel,
        "get_tensor_model_parallel_world_size": layout.tensor_parallel,
    }


def _group(item: Item, samples: list[Any]) -> Group:
    completions = [
        Completion(
            sample.tokens[len(sample.tokens) - sample.response_length :],
            sample.rollout_log_probs,
            REASONS[sample.status.value],
            text=sample.response,
            sampled=None if sample.loss_mask is None else [bool(each) for each in sample.loss_mask],
        )
        for sample in samples
    ]
    length = len(samples[0].tokens) - samples[0].response_length
    rewards = [float("nan") if sample.reward is None else sample.reward for sample in samples]
    return Group(samples[0].tokens[:length], completions, rewards, item_id=item.id)
