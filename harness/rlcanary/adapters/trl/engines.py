"""TRL's `VLLMGeneration`, in server mode, whose server is an engine of the checks.

The requests, their parameters, the answers and the order of the weights are TRL's. What lies behind them, HTTP and NCCL, is
a call of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rlcanary.adapters.trl import releases
from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.batch import Completion

# What vLLM calls a parameter, and what the engine calls it. The engine's logprobs are processed ones, which TRL asks for.
PARAMETERS = {
    "n": "n",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_new_tokens",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop_sequences",
    "seed": "seed",
}


def generation_of(engine: Any, trainer: Any, sampling: Mapping[str, Any] | None = None) -> Any:
    """Construct the `VLLMGeneration` of a trainer.

    Args:
        engine: what its server has.
        trainer: the trainer, whose model it syncs.
        sampling: the parameters of its requests, as the contract names them; none if it samples nothing.
    """
    VLLMGeneration = releases.part("trl.generation.vllm_generation:VLLMGeneration")
    given, names = dict(sampling or {}), ("temperature", "top_p", "top_k", "repetition_penalty")
    # As settings of a run, which keeps its own where the request names none: those with a place, and `generation_kwargs`.
    parameters = {name: given.get(name, getattr(trainer, name)) for name in names}
    parameters |= {
        "min_p": trainer.min_p,
        "max_completion_length": given.get("max_new_tokens", trainer.max_completion_length),
    }
    own = dict(trainer.args.generation_kwargs or {})
    if unknown := own.keys() - {*PARAMETERS, "stop_token_ids", "ignore_eos"}:
        raise NotProvided(f"the engine has no {', '.join(sorted(unknown))}")
    own |= {
        theirs: given[ours]
        for theirs, ours in {"seed": "seed", "stop": "stop_sequences"}.items()
        if given.get(ours) not in (None, ())
    }
    if given.get("eos_token_ids") is not None:  # stop ids stand beside the model's own ends
        own |= {"stop_token_ids": list(given["eos_token_ids"]), "ignore_eos": True}
    module = "trl.generation.vllm_generation"
    if "is_fsdp_enabled" in releases.parameters(VLLMGeneration):
        parameters["is_fsdp_enabled"] = False
    with (
        patch(f"{module}.VLLMClient", _client_class(engine)),
        patch(f"{module}.is_vllm_available", lambda: True),
        patch("torch.cuda.current_device", lambda: 0),
    ):
        return VLLMGeneration(
            model=trainer.model,
            accelerator=trainer.accelerator,
            processing_class=trainer.processing_class,
            mode="server",
            generation_kwargs=own,
            **parameters,
        )


def _client_class(engine: Any) -> Any:
    client = releases.part("trl.generation.vllm_client:VLLMClient")

    class Client(client):  # type: ignore[misc, valid-type]
        """TRL's client of a server that lies in this process."""

        def __init__(self, **_: Any) -> None:
            self.base_url, self.model, self._updating_weights = "", "", False
            # Older clients talk to TRL's own server, newer ones to vLLM's.
            self.session = self.communicator = _OwnServer(engine)
            self.rank = 0

        def init_communicator(self, device: Any = 0) -> None:
            """Do nothing: weights are handed over."""

        def update_named_params(self, metadata: list[Any], named_params: Iterator[tuple[str, Any]]) -> None:
            self._start_weight_update()
            engine.load_weights(_announced(metadata, named_params))
            self._finish_weight_update()

        def _post(self, url: str, json: Mapping[str, Any] | None = None) -> dict[str, Any]:
            match url.rpartition("/")[2]:
                case "completions":
                    return {"choices": _completions(engine, dict(json or {}))}
                case "finish_weight_update":
                    engine.version += 1
                case "reset_prefix_cache":
                    engine.reset_prefix_cache()
            return {}

    return Client


class _OwnServer:
    """TRL's server of its own: a session of requests, and the group in which the weights are broadcast."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.group = self
        self._announced: Mapping[str, Any] = {}

    def post(self, url: str, json: Mapping[str, Any] | None = None) -> Any:
        body: dict[str, Any] = {}
        match url.strip("/").rpartition("/")[2]:
            case "generate":
                body = _answered(self.engine, dict(json or {}))
            case "update_named_param":
                self._announced = dict(json or {})
            case "reset_prefix_cache":
                self.engine.version += 1
                self.engine.reset_prefix_cache()
        return SimpleNamespace(status_code=200, json=lambda: body)

    def broadcast(self, weights: Any, src: int) -> None:
        """Take the weights that were announced.

        Raises:
            RuntimeError: others come, whose bytes would be read wrongly.
        """
        told = self._announced
        if (told["dtype"], tuple(told["shape"])) != (str(weights.dtype), tuple(weights.shape)):
            raise RuntimeError(f"the server was told of {told} and is sent {weights.dtype} {tuple(weights.shape)}")
        self.engine.load_weights(iter([(told["name"], weights)]))

    def barrier(self) -> None:
        """Do nothing: nobody else takes part."""


def _answered(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request as TRL's server does."""
    choices = _completions(engine, {**request, "prompt": request["prompts"], **request["generation_kwargs"]})
    return {
        "prompt_ids": request["prompts"],
        "completion_ids": [choice["token_ids"] for choice in choices],
        "logprobs": [[[value] for value in choice["logprobs"]["token_logprobs"]] for choice in choices],
        "logprob_token_ids": [[[token] for token in choice["token_ids"]] for choice in choices],
    }


def _announced(metadata: list[Any], named_params: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Hand over tensors to a server that was told what comes.

    Raises:
        RuntimeError: another one comes, whose bytes would be read wrongly.
    """
    for told, (name, tensor) in zip(metadata, named_params, strict=True):
        sent = (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        if sent != tuple(told):
            raise RuntimeError(f"the server was told of {told} and is sent {sent}")
        yield name, tensor


def _completions(engine: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Answer a request for completions as vLLM's server does."""
    parameters = {PARAMETERS[name]: value for name, value in request.items() if name in PARAMETERS}
    if request.get("min_p"):
        raise NotProvided("the engine has no min_p")
    ends, is_without_own = request.get("stop_token_ids") or (), request.get("ignore_eos", False)
    if ends or is_without_own:
        parameters["eos_token_ids"] = (*ends, *(() if is_without_own else engine.eos_token_ids))
    prompts = request["prompt"]
    groups = engine.generate(prompts, {**parameters, "logprobs": "processed"})
    return [_choice(prompt, each) for prompt, group in zip(prompts, groups, strict=True) for each in group]


def _choice(prompt: list[int], completion: Completion) -> dict[str, Any]:
    if completion.logprobs is None or completion.sampled is not None:
        raise NotProvided("vLLM gives the logprob of each token, and samples all of them")
    ids = [int(token) for token in completion.token_ids]
    tokens = [f"token_id:{token}" for token in ids]
    logprobs = {"tokens": tokens, "token_logprobs": list(completion.logprobs), "top_logprobs": [None] * len(tokens)}
    return {
        "prompt_token_ids": list(prompt),
        "token_ids": ids,
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
        "text": completion.text,
    }
