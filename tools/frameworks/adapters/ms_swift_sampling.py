"""Rollouts, requests and weight syncs of ms-swift: its engines, on a model or on an engine of the checks."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ms_swift_data import SwiftData, reward_of
from ms_swift_trainers import grpo_trainer, row

from rlcanary.adapters.frameworks import part, quiet
from rlcanary.adapters.trl.trainer.trainers import dataset_of
from rlcanary.adapters.trl.training import TIMES
from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.batch import Completion, Group
    from rlcanary.contract.state import Item

# What `GRPOConfig` calls a sampling parameter.
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_completion_length",
}
# Parameters of a request for which it has no setting, at their defaults.
WITHOUT: Mapping[str, Any] = {"seed": None, "min_tokens": 0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# What vLLM calls them, and what the engine calls them.
OF_VLLM = {
    "n": "n",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_tokens": "max_new_tokens",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
}


class SwiftSampling(SwiftData):
    """Sampling from an engine that has the trainer's weights."""

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        """Sample from a copy of the engine's model by swift's `TransformersEngine`, which `use_vllm=False` stands for."""
        from rlcanary.contract.batch import Completion
        from rlcanary.contract.layers import copied

        count = sampling.get("n", 1)
        settings = {**self._own_settings, **_settings_of(sampling)}
        trainer = grpo_trainer(settings, copied(engine.model), replays=False)
        trainer.model.train()
        texts = [trainer.template.tokenizer.decode(ids) for ids in prompts for _ in range(count)]
        with quiet():
            samples = trainer._generate_completions(trainer.to_samples([row(text) for text in texts]))
        completions = [Completion(list(each.response_token_ids), None, each.finish_reason) for each in samples]
        return [completions[first : first + count] for first in range(0, len(completions), count)]

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        from rlcanary.contract.batch import Completion, Group

        count = sampling.get("n", 1)
        settings = {**self._own_settings, **_settings_of(sampling)}
        trainer = grpo_trainer(settings, tokenizer=engine.tokenizer)
        trainer.engine = vllm_engine(engine, trainer)
        _use_vllm(trainer)
        trainer._last_loaded_step = trainer.state.global_step  # the weights of the engine are those of its model
        trainer.num_generations = count
        trainer.reward_funcs, trainer.reward_func_names = [reward_of(items)], ["reward"]
        trainer._logs["rewards"]["reward"] = []
        trainer.model.train()
        # Swift takes messages, and the items are prompts behind its tokenizer.
        trainer.template._tokenize = lambda text, **_: list(items[int(text)].prompt_ids)
        rows = [row(str(n), item=n) for n in range(len(items)) for _ in range(count)]
        with quiet():
            samples = trainer._score_completions(trainer._rollout_samples(rows))
        rewards = trainer._rewards_per_func[:, 0].tolist()
        completions = []
        for each in samples:
            logprobs = [value for turn in each.rollout_logprobs for value in turn]
            text = each.messages[-1]["content"]
            completions.append(Completion(list(each.response_token_ids), logprobs, each.finish_reason, text=text))
        with trainer.template.generate_context():
            prompts = [trainer.template.encode({"messages": each.messages[:-1]})["input_ids"] for each in samples]
        return [
            Group(prompts[first], completions[first : first + count], rewards[first : first + count], item_id=item.id)
            for item, first in zip(items, range(0, len(rows), count), strict=True)
        ]

    def sync_weights(self, state: Any, engine: Any) -> None:
        trainer = state.trainer
        _require_names(trainer.model)
        replaying, trainer.engine = trainer.engine, vllm_engine(engine, trainer)
        _use_vllm(trainer)
        try:
            with state.running(), quiet():
                trainer._move_model_to_vllm()
        finally:
            trainer.engine, trainer.use_fast_infer = replaying, False

    def evaluate(self, state: Any) -> dict[str, float]:
        items = list(state.eval_items)
        with state.running() as trainer:
            decode = trainer.template.tokenizer.decode
            rows = [row(decode(item.prompt_ids), item=number) for number, item in enumerate(items)]
            before = trainer.reward_funcs, trainer.engine, trainer.args.per_device_eval_batch_size
            trainer.reward_funcs, trainer.engine = [reward_of(items)], trainer.engine.of_model
            trainer.args.per_device_eval_batch_size = trainer.num_generations_eval
            try:
                trainer.evaluate(dataset_of(rows))
                metrics = trainer.state.log_history[-1]
            finally:
                trainer.reward_funcs, trainer.engine, trainer.args.per_device_eval_batch_size = before
        own = {name.removeprefix("eval_"): value for name, value in metrics.items() if name not in TIMES}
        return {name: value for name, value in own.items() if isinstance(value, int | float)}

    @property
    def _own_settings(self) -> dict[str, Any]:
        return {name: value for name, value in self.settings.items() if name != "soft_cache_length"}


def _settings_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a request as settings of a run.

    Raises:
        NotProvided: swift has no setting for one.
    """
    for name, default in WITHOUT.items():
        if sampling.get(name, default) != default:
            raise NotProvided(f"requests have no {name}")
    given = {theirs: sampling[ours] for ours, theirs in NAMES.items() if ours in sampling}
    ends = [[int(token)] for token in sampling.get("eos_token_ids") or ()]
    return {**given, "stop_words": [*ends, *(sampling.get("stop_sequences") or ())]}


def _require_names(model: Any) -> None:
    """Decline models whose weights are sent under the names of their checkpoint, as vLLM expects them.

    Raises:
        NotProvided: they are not those of the model, which the engine of the checks has.
    """
    from swift.rlhf_trainers import utils

    # A run has one model, by which this is filled once.
    utils._cached_reverse_renamings = None
    names = dict(model.named_parameters())
    if utils.revert_runtime_names_to_checkpoint(model, names).keys() != names.keys():
        raise NotProvided("the weights of this model have other names in its checkpoint, under which they are sent")


def _use_vllm(trainer: Any) -> None:
    trainer.use_fast_infer, trainer.vllm_mode = True, "colocate"
    trainer.request_config.logprobs = True  # as with use_vllm


def vllm_engine(engine: Any, trainer: Any) -> Any:
    """Make a `GRPOVllmEngine` of swift around an engine of the checks, which stands in for vLLM's `LLMEngine`."""
    made_of = part("swift.infer_engine:GRPOVllmEngine")
    own = made_of.__new__(made_of)
    own.engine = Core(engine)
    own.template, own.processor = trainer.template, trainer.template.processor
    own.use_async_engine = own.enable_lora = False
    own.default_adapter_request = None
    own._request_count, own.max_tokens_offset = 0, 0
    own.task_type, own.model_name = "causal_lm", ""
    own.max_model_len = trainer.template.max_length
    own.generation_config = SimpleNamespace(stop=[])
    own.engine_args = SimpleNamespace(tensor_parallel_size=1)
    return own


class Core:
    """An engine of the checks with the methods of vLLM's `LLMEngine` that swift calls."""

    model_config = None

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.waiting: list[tuple[str, list[int], Any]] = []
        # The path on which swift finds the model.
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=runner), is_sleeping=False)

    def add_request(self, request_id: str, inputs: dict[str, Any], parameters: Any, **_: Any) -> None:
        self.waiting.append((request_id, list(inputs["prompt_token_ids"]), parameters))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        """Answer all requests at once."""
        asked, self.waiting = self.waiting, []
        return [self._answered(*each) for each in asked]

    def _answered(self, request_id: str, prompt: list[int], parameters: Any) -> Any:
        sampling = {ours: getattr(parameters, theirs) for theirs, ours in OF_VLLM.items()}
        sampling |= {"logprobs": "processed", "eos_token_ids": tuple(parameters.stop_token_ids or ())}
        sampling["top_k"] = max(sampling["top_k"], 0)
        texts = [word for word in parameters.stop or () if len(self.engine.tokenizer.encode(word)) > 1]
        sampling["stop_sequences"] = tuple(texts)
        ((completion,),) = self.engine.generate([prompt], sampling)
        if completion.logprobs is None or completion.sampled is not None:
            raise NotProvided("vLLM gives the logprob of each token, and samples all of them")
        ids = list(completion.token_ids)
        scores = None
        if parameters.logprobs is not None:
            scores = [
                {token: SimpleNamespace(logprob=value)} for token, value in zip(ids, completion.logprobs, strict=True)
            ]
        output = SimpleNamespace(index=0, token_ids=ids, logprobs=scores, finish_reason=completion.finish_reason)
        return SimpleNamespace(request_id=request_id, prompt_token_ids=prompt, outputs=[output], finished=True)

    def load_weights(self, weights: Any) -> None:
        self.engine.load_weights(weights)

    def reset_prefix_cache(self) -> None:
        self.engine.version += 1
        self.engine.reset_prefix_cache()

    def reset_encoder_cache(self) -> None:
        """Do nothing: text has no encoder."""
