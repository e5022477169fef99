"""The numbers that open-instruct logs, its settings, and the groups that wait between sampler and trainer."""

from __future__ import annotations

import math
import queue
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import open_instruct_run as run
from open_instruct_objective import NO_PADDING, Objective
from open_instruct_rollouts import evaluation_of

from rlcanary.adapters.frameworks import takes
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.records.buffering import Taken
from rlcanary.contract.records.preparation import Setting

if TYPE_CHECKING:
    from rlcanary.contract.records.buffering import BufferSettings
    from rlcanary.contract.records.reporting import EvaluatedItem, RolloutBatch

LOGGED = {
    "scores": "reward",
    "val/sequence_lengths": "length",
    "val/sequence_lengths_min": "length_min",
    "val/sequence_lengths_max": "length_max",
    "val/stop_rate": "stopped",
    "num_steps_off_policy": "staleness",
}
# Options by name, with the object of the configuration that has them in a run.
SETTINGS = (
    Setting("learning_rate", (1e-6, 5e-5)),
    Setting("weight_decay", (0.1, 0.0)),
    Setting("warmup_ratio", (0.1, 0.0)),
    Setting("lr_scheduler_type", ("cosine", "constant")),
    Setting("max_grad_norm", (0.5, 0.0)),
    Setting("num_epochs", (2, 1)),
    Setting("num_mini_batches", (2, 1)),
    Setting("clip_lower", (0.1, 0.0)),
    Setting("clip_higher", (0.3, 0.0)),
    Setting("beta", (0.1, 0.0)),
    Setting("seed", (7, 0)),
    Setting("record_entropy", (True, False)),
    Setting("mask_truncated_completions", (True, False)),
    Setting("filter_zero_std_samples", (True, False)),
    Setting("advantage_normalization_type", ("standard", "centered")),
    Setting("temperature", (0.7, 0.0)),
    Setting("vllm_top_p", (0.9, 1.0)),
    Setting("response_length", (128, 64)),
    Setting("eval_response_length", (32, 16), derived_from=("response_length",)),
    Setting("eval_pass_at_k", (4, 1)),
)


@dataclass
class Buffer:
    """The queue of results, and what the loop that prepares data takes from it.

    Attributes:
        settings: those of the buffer.
        results: the queue of the sampler's results.
        groups: all groups that were put, by the index of their results.
    """

    settings: BufferSettings
    results: queue.Queue[Any]
    groups: list[Group] = field(default_factory=list)


def _scored(completion: Completion) -> Completion:
    return replace(completion, logprobs=completion.logprobs or [math.nan] * len(completion.token_ids))


class Reporting(Objective):
    """What is logged, configured and kept waiting."""

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        # The numbers are of rewards, lengths and ends: the engine's logprobs, which it always gives, are not read.
        groups = [replace(group, completions=[_scored(each) for each in group.completions]) for group in batch.groups]
        made = run.prepared(self.settings, groups, NO_PADDING, version=batch.trainer_version)
        return {ours: float(made.metrics[theirs]) for theirs, ours in LOGGED.items()}

    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        counts = {len(item.scores) for item in items}
        if len(counts) > 1:
            raise NotProvided("eval_pass_at_k is one number")
        if any(math.isnan(score) for item in items for score in item.scores):
            raise NotProvided("a verifier of open-instruct returns a number")
        count = counts.pop()
        prompts = [[1]] * len(items)
        results = [
            run.result_of(Group([1], [Completion([1], [0.0])] * count, list(item.scores)), number)
            for number, item in enumerate(items)
        ]
        configs = self.configs(with_tracking=True, num_training_steps=2)
        tokenizer = SimpleNamespace(pad_token="<pad>", batch_decode=lambda rows, **_: [""] * len(rows))
        logged = evaluation_of(configs, SimpleNamespace(n=count), results, prompts, tokenizer)
        found = {"mean@n": logged["eval/scores"]}
        if f"eval/pass_at_{k}_unbiased" in logged:
            found["pass@k"] = logged[f"eval/pass_at_{k}_unbiased"]
        return found

    # Settings

    def list_settings(self) -> list[Setting]:
        return list(SETTINGS)

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """Parse a command line as `grpo_fast.py` does, and read what the run is set up with."""
        from open_instruct import data_loader, grpo_fast, grpo_utils

        parser = grpo_fast.ArgumentParserPlus(
            (
                grpo_utils.GRPOExperimentConfig,
                grpo_fast.TokenizerConfig,
                grpo_fast.ModelConfig,
                data_loader.StreamingDataLoaderConfig,
                data_loader.VLLMConfig,
                grpo_fast.EnvsConfig,
            )
        )
        parser.set_defaults(**run.RUN)
        line = ["--model_name_or_path", "model", "--push_to_hub", "False"]
        for name, value in written.items():
            line += [f"--{name}", str(value)]
        try:
            with run.on_cpu():
                args, _, _, streaming, vllm, _ = parser.parse_args_into_dataclasses(line)
        except SystemExit as error:
            raise ValueError("the command line is refused") from error
        args = grpo_fast.setup_runtime_variables(args, streaming, SimpleNamespace(enabled=False))
        configs = grpo_fast.create_generation_configs(args, streaming, vllm)
        sampled = {
            "temperature": configs["train"].temperature,
            "vllm_top_p": configs["train"].top_p,
            "response_length": configs["train"].max_tokens,
            "eval_response_length": configs["eval"].max_tokens,
            "eval_pass_at_k": configs["eval"].n,
            "seed": configs["train"].seed,
        }
        others = {**vars(vllm), **vars(streaming), **vars(args)}
        return {each.name: sampled.get(each.name, others[each.name]) for each in SETTINGS}

    # Between sampler and trainer

    def new_buffer(self, settings: BufferSettings) -> Any:
        return Buffer(settings, queue.Queue(maxsize=settings.capacity or 0))

    def put_groups(self, buffer: Buffer, groups: list[Group]) -> int:
        for number, group in enumerate(groups):
            if any(each.token_versions is not None for each in group.completions):
                raise NotProvided("open-instruct keeps one policy version per result")
            if buffer.results.full():
                return number
            buffer.results.put(run.result_of(group, len(buffer.groups)))
            buffer.groups.append(group)
        return len(groups)

    def take_groups(self, buffer: Buffer, trainer_version: int) -> Taken:
        from open_instruct import data_loader
        from open_instruct.data_types import EnvConfig

        sizes = {len(group.completions) for group in buffer.groups}
        if len(sizes) > 1:
            raise NotProvided("num_samples_per_prompt_rollout is one number for all prompts")
        if not sizes:
            return Taken([])
        count = sizes.pop()
        has_limit = takes(data_loader.accumulate_inference_batches, "max_result_age_steps")
        if not has_limit and buffer.settings.max_staleness is not None:
            raise NotProvided("results of this tree have no limit on their age")
        limit = {"max_result_age_steps": buffer.settings.max_staleness} if has_limit else {}
        dataset = run.dataset_of([group.prompt_ids for group in buffer.groups])
        settings = buffer.settings
        with run.on_cpu():
            loader = data_loader.HFDataLoader(
                dataset=dataset,
                batch_size=1,
                seed=0,
                dp_rank=0,
                dp_world_size=1,
                work_dir="",
                automatic_reshuffle=True,
                collator=data_loader.single_example_collator,
            )
            try:
                _, batch, _, _ = data_loader.accumulate_inference_batches(
                    buffer.results,
                    SimpleNamespace(n=count),
                    num_prompts=settings.groups_per_batch,
                    model_dims=None,
                    tokenizer=SimpleNamespace(batch_decode=lambda rows, **_: [""] * len(rows)),
                    dataset=dataset,
                    base_env_config=EnvConfig(),
                    training_step=trainer_version,
                    timeout=0.001,
                    active_sampling=settings.dynamic_sampling,
                    filter_zero_std_samples=settings.dynamic_sampling,
                    replenish_prompts=True,
                    iter_dataloader=loader,
                    param_prompt_Q=queue.Queue(),
                    **limit,
                )
            except queue.Empty:
                return Taken([])
        return Taken([buffer.groups[index] for index in batch.indices[::count]])
