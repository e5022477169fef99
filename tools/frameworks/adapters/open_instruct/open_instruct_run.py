"""open-instruct in one process on the CPU: its imports, its configuration, and one run of its loop that prepares data."""

from __future__ import annotations

import queue
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, make_dataclass
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rlcanary.adapters.frameworks import quiet, usable
from rlcanary.adapters.stubs import absent
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import Group

INSTALL = "put a checkout of open-instruct and the packages that tools/frameworks/run gets for it on PYTHONPATH"
# Servers, loggers, sandboxes and the distributed runtime: the code under test calls none of them.
SERVICES = (
    *("deepspeed", "wandb", "beaker", "docker", "fastmcp", "litellm", "nltk", "langdetect"),
    *("cached_path", "google.cloud.storage", "boto3"),
)
# What is imported of vLLM, whose releases move these names.
VLLM = {
    "vllm": ("SamplingParams", "AsyncEngineArgs", "AsyncLLMEngine"),
    "vllm.config": ("WeightTransferConfig",),
    "vllm.distributed.weight_transfer.base": ("WeightTransferInitRequest", "WeightTransferUpdateRequest"),
    "vllm.distributed.weight_transfer.ipc_engine": ("IPCTrainerSendWeightsArgs", "IPCWeightTransferEngine"),
    "vllm.distributed.weight_transfer.nccl_engine": ("NCCLTrainerSendWeightsArgs", "NCCLWeightTransferEngine"),
    "vllm.entrypoints.openai.api_server": ("build_app", "init_app_state"),
    "vllm.entrypoints.openai.chat_completion.protocol": ("ChatCompletionRequest",),
    "vllm.entrypoints.openai.cli_args": ("make_arg_parser",),
    "vllm.tool_parsers": ("ToolParser",),
    "vllm.utils.argparse_utils": ("FlexibleArgumentParser",),
    "vllm.v1.core": ("kv_cache_utils",),
    "vllm.v1.kv_cache_interface": (),
}
# The defaults that grpo_fast.py gives to its own parser.
RUN = {"exp_name": "grpo", "warmup_ratio": 0.0, "max_grad_norm": 1.0, "per_device_train_batch_size": 1}


@contextmanager
def stubs_of_vllm() -> Iterator[None]:
    """Let imports of the block find stubs of vLLM, whether it is installed or not."""

    def taken() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "vllm"}

    before = taken()
    for name, names in VLLM.items():
        stub = ModuleType(name, "A stub.")
        vars(stub).update({each: type(each, (), {}) for each in names})
        sys.modules[name] = stub
    vars(sys.modules["vllm.v1.kv_cache_interface"])["MambaSpec"] = make_dataclass("MambaSpec", [("dtypes", tuple)])
    try:
        yield
    finally:
        taken()
        sys.modules.update(before)


def imported() -> None:
    """Import open-instruct.

    Raises:
        UserError: open-instruct or OLMo-core is not installed or cannot be imported.
    """
    with (
        usable("olmo_core", INSTALL, "OLMo-core 3.0"),
        usable("open_instruct", INSTALL, "open-instruct of May to August 2026"),
        stubs_of_vllm(),
        absent(*SERVICES),
        quiet(),
    ):
        import open_instruct.dpo_utils
        import open_instruct.grpo_fast
        import open_instruct.olmo_core_train_modules  # noqa: F401


@dataclass
class Configs:
    """The dataclasses that `grpo_fast.py` parses its options into."""

    args: Any
    streaming: Any
    vllm: Any


def configs_of(settings: Mapping[str, Any]) -> Configs:
    """Make open-instruct's own configuration with the defaults of `grpo_fast.py`, and these options.

    Raises:
        AttributeError: open-instruct has no such option.
    """
    from open_instruct.data_loader import StreamingDataLoaderConfig, VLLMConfig
    from open_instruct.grpo_utils import GRPOExperimentConfig

    given, made = {**RUN, **settings}, []
    with quiet():
        for kind in (GRPOExperimentConfig, StreamingDataLoaderConfig, VLLMConfig):
            names = {field.name for field in fields(kind)}
            made.append(kind(**{name: given.pop(name) for name in list(given) if name in names}))
    if given:
        raise AttributeError(f"open-instruct has no option {', '.join(given)}")
    return Configs(*made)


@contextmanager
def on_cpu(**places: Any) -> Iterator[None]:
    """Run code of open-instruct alone in this process, without compilation and without messages.

    Args:
        places: functions of `torch.distributed` that another rank has a part in, such as `all_reduce`.
    """
    import torch

    with ExitStack() as stack:
        for name, value in {"all_reduce": lambda *_, **__: None, **places}.items():
            stack.enter_context(patch.object(torch.distributed, name, value))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(quiet())
        yield


@contextmanager
def as_loaded(*models: Any) -> Iterator[None]:
    """Turn the cache of models off, as open-instruct does when it loads them: with one, packed rows would see each other."""
    with ExitStack() as stack:
        for config in [model.config for model in models if hasattr(model, "config")]:
            stack.enter_context(patch.object(config, "use_cache", False))
        yield


@dataclass
class Prepared:
    """What the loop that prepares data made of the groups of one update.

    Attributes:
        packed: the packed sequences, in the order of the rows.
        collated: the micro-batches of each rank.
        metrics: what is logged of the rollouts.
    """

    packed: Any
    collated: list[Any]
    metrics: dict[str, Any]

    def rows(self, name: str) -> list[Tensor]:
        """Return a field of the packed sequences, such as "advantages", row by row."""
        rows = []
        for documents, values in zip(self.packed.attention_masks, getattr(self.packed, name), strict=True):
            rows.extend(values[documents == number] for number in range(1, int(documents.max()) + 1))
        return rows


def result_of(group: Group, number: int) -> Any:
    """Make of a group what the sampler puts into the queue of results."""
    from open_instruct.data_types import GenerationResult, RequestInfo, TokenStatistics

    given = group.completions
    if any(each.logprobs is None for each in given):
        raise NotProvided("the engine gives the logprobs of all that it samples")
    if any(not each.token_ids for each in given):
        raise NotProvided("an empty completion is given the tokenizer's end-of-sequence id")
    count = len(given)
    return GenerationResult(
        responses=[list(each.token_ids) for each in given],
        finish_reasons=[each.finish_reason for each in given],
        masks=[
            [1] * len(each.token_ids) if each.sampled is None else [int(one) for one in each.sampled] for each in given
        ],
        request_info=RequestInfo(
            num_calls=[0] * count,
            timeouts=[False] * count,
            tool_errors=[""] * count,
            tool_outputs=[""] * count,
            tool_runtimes=[0.0] * count,
            tool_calleds=[False] * count,
            tool_call_stats=[[] for _ in given],
            rollout_states=[{} for _ in given],
        ),
        index=number,
        prompt_id=f"0_{number}",
        token_statistics=TokenStatistics(len(group.prompt_ids), sum(len(each.token_ids) for each in given), 1.0),
        logprobs=[list(each.logprobs or ()) for each in given],
        reward_scores=[float(reward) for reward in group.rewards],
        reward_metrics={},
        model_step=group.policy_version,
    )


def dataset_of(prompts: Sequence[Sequence[int]], sources: Sequence[str] | None = None) -> Any:
    """Make a dataset of open-instruct's, as its preparation leaves it."""
    from datasets import Dataset
    from open_instruct import dataset_transformation as names

    count = range(len(prompts))
    columns = {
        "index": list(count),
        names.INPUT_IDS_PROMPT_KEY: [list(prompt) for prompt in prompts],
        names.GROUND_TRUTHS_KEY: [[str(number)] for number in count],
        names.VERIFIER_SOURCE_KEY: [[source] for source in sources or [""] * len(prompts)],
        names.RAW_PROMPT_KEY: [str(number) for number in count],
    }
    return Dataset.from_dict(columns)


def preparation_actor(
    configs: Configs, dataset: Any, pad_token_id: int, steps: int, prompts: int, ranks: int = 1, folder: str = ""
) -> Any:
    """Make the actor that prepares data, in this process, with queues of Python."""
    from open_instruct import data_loader, grpo_fast

    tokenizer = SimpleNamespace(
        pad_token_id=pad_token_id, eos_token_id=None, batch_decode=lambda rows, **_: [str(row) for row in rows]
    )
    return data_loader.DataPreparationActor.__ray_metadata__.modified_class(
        dataset=dataset,
        inference_results_Q=queue.Queue(),
        param_prompt_Q=queue.Queue(),
        tokenizer=tokenizer,
        config=configs.streaming,
        generation_config=grpo_fast.create_generation_configs(configs.args, configs.streaming, configs.vllm)["train"],
        num_training_steps=steps,
        seed=configs.args.seed,
        per_device_train_batch_size=configs.args.per_device_train_batch_size,
        global_batch_size=prompts,
        dp_world_size=ranks,
        max_possible_score=configs.streaming.max_possible_score,
        actor_manager=None,
        model_dims=None,
        verbose=False,
        work_dir=folder or tempfile.gettempdir(),
        tool_names=[],
        run_name="run",
        model_name=None,
        base_env_config=_no_tools(),
    )


def _no_tools() -> Any:
    from open_instruct.data_types import EnvConfig

    return EnvConfig()


def limits_of(groups: Sequence[Group]) -> dict[str, int]:
    """Return the limits of a run whose longest prompt and completion are these; a packed sequence has no more tokens."""
    prompt = max(len(group.prompt_ids) for group in groups)
    response = max(len(each.token_ids) for group in groups for each in group.completions)
    return {"max_prompt_token_length": prompt, "response_length": response, "pack_length": prompt + response}


def prepared(
    settings: Mapping[str, Any], groups: Sequence[Group], pad_token_id: int, ranks: int = 1, version: int = 0
) -> Prepared:
    """Run the loop that prepares data on the groups of one update.

    Raises:
        NotProvided: the groups are of several sizes, or none of them is left to train.
    """
    from open_instruct import data_loader
    from open_instruct.data_types import ShutdownSentinel

    sizes = {len(group.completions) for group in groups}
    if len(sizes) > 1:
        raise NotProvided("num_samples_per_prompt_rollout is one number for all prompts")
    number = {"num_samples_per_prompt_rollout": sizes.pop(), "num_unique_prompts_rollout": len(groups)}
    configs = configs_of({**settings, **number, **limits_of(groups)})
    kept: list[Any] = []
    collate = data_loader.prepare_collated_data_for_workers

    def collated(packed: Any, *arguments: Any, **options: Any) -> Any:
        kept.append(packed)
        return collate(packed, *arguments, **options)

    with on_cpu(), patch.object(data_loader, "prepare_collated_data_for_workers", collated):
        dataset = dataset_of([group.prompt_ids for group in groups], [group.dataset for group in groups])
        actor = preparation_actor(configs, dataset, pad_token_id, version + 1, len(groups), ranks)
        actor.training_step, actor._last_consumed_step = version, version - 1
        for place, group in enumerate(groups):
            actor.inference_results_Q.put(result_of(group, place))
        actor.inference_results_Q.put(ShutdownSentinel())  # behind the last group, where the loop would wait for more
        actor._data_preparation_loop()
    if not kept:
        raise NotProvided("no completion is left to train, and the loop samples others")
    return Prepared(kept[0], actor.prepared_data[version], actor.metrics[version])
