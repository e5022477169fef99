"""SkyRL's generator with its agent loop: the engine of the checks behind its client, and environments of its gym."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from typing import Any

from rlcanary.adapters.skyrl.base import SkyrlBase
from rlcanary.adapters.skyrl.workers import on_cpu
from rlcanary.contract.adapter import Item, NotProvided
from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.records.conversations import (
    ConversationOptions,
    ConversationRow,
    Environment,
    Episode,
    Reply,
    Task,
)
from rlcanary.contract.sampling import Sampling

ENVIRONMENT = "rlcanary"
# The numbers that a request has beside what SkyRL's settings name, with their neutral values.
FURTHER = {"repetition_penalty": 1.0, "min_p": 0.0}


class Rollouts(SkyrlBase):
    """Completions of items and conversations."""

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        def answers(extras: Mapping[str, Any]) -> Callable[[str], Reply]:
            item = items[extras["number"]]

            def reply(text: str) -> Reply:
                reward = item.reward(text)
                return Reply(reward=float("nan") if reward is None else float(reward), ended=True)

            return reply

        request = Sampling(**sampling).with_ends(())
        if request.stop_sequences:
            raise NotProvided("behind a stop text SkyRL inserts an EOS, which it does not train")
        tokenizer = _prompted(engine.tokenizer, [list(item.prompt_ids) for item in items])
        prompts = [[{"role": "user", "content": str(number)}] for number in range(len(items))]
        rows = self._generated(engine, tokenizer, prompts, request, answers)
        groups = []
        for number, item in enumerate(items):
            own = rows[number * request.n : (number + 1) * request.n]
            completions = [row.completion for row, _ in own]
            rewards = [sum(rewards) for _, rewards in own]
            groups.append(Group(own[0][0].prompt_ids, completions, rewards, item_id=item.id))
        return groups

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> list[list[Episode]]:
        request = Sampling(**options.sampling).with_ends(())
        if options.max_tokens is not None:
            raise NotProvided("max_input_length bounds the prompt of an answer, not the row")

        def session(extras: Mapping[str, Any]) -> Callable[[str], Reply]:
            return environment.start(tasks[extras["number"]].id).reply

        prompts = [[dict(message) for message in task.messages] for task in tasks]
        rows = self._generated(engine, tokenizer, prompts, request, session, options.max_turns)
        episodes = [
            Episode(tasks[place // request.n].id, [row], sum(rewards)) for place, (row, rewards) in enumerate(rows)
        ]
        return [episodes[start : start + request.n] for start in range(0, len(episodes), request.n)]

    def _generated(
        self,
        engine: Any,
        tokenizer: Any,
        prompts: list[list[dict[str, Any]]],
        request: Sampling,
        replies: Callable[[Mapping[str, Any]], Callable[[str], Reply]],
        max_turns: int | None = 1,
    ) -> list[tuple[ConversationRow, list[float]]]:
        """Generate `n` trajectories of each prompt -> the row and the rewards of tokens of each, in order."""
        import skyrl_gym
        from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
        from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
        from skyrl.train.generators.utils import prepare_generator_input
        from skyrl_gym.envs.registration import registry

        config = copy.deepcopy(self.config)
        given = config.generator.sampling_params
        given.temperature, given.top_p, given.top_k = request.temperature, request.top_p, request.top_k or -1
        given.max_generate_length = request.max_new_tokens
        given.stop = list(request.stop_sequences) or None
        config.generator.max_turns = max_turns or 10**6
        config.generator.max_input_length = 10**6
        # With threads the order of the requests, and so the findings, would differ from run to run.
        config.environment.skyrl_gym.max_env_workers = 0
        own = tokenizer.eos_token_id
        if set(request.ends) - {own}:
            raise NotProvided("SkyRL has no setting for further EOS ids")
        if request.seed is not None:
            raise NotProvided("SkyRL has no setting for the seed of a request")
        registry.pop(ENVIRONMENT, None)
        skyrl_gym.register(id=ENVIRONMENT, entry_point=_environment(replies))
        rows = [
            {"prompt": prompt, "env_class": ENVIRONMENT, "env_extras": {"number": number}, "uid": str(number)}
            for number, prompt in enumerate(prompts)
        ]
        with on_cpu():
            params = get_sampling_params_for_backend("vllm", given)
            generator = SkyRLGymGenerator(
                config.generator, config.environment.skyrl_gym, _Client(engine, tuple(request.ends)), tokenizer
            )
            batch, _ = prepare_generator_input(rows, request.n, params, ENVIRONMENT, "train", 0)
            output = asyncio.run(generator.generate(batch, disable_tqdm=True))
        logprobs = output["rollout_logprobs"] or [None] * len(output["response_ids"])
        parts = zip(
            *(output[name] for name in ("prompt_token_ids", "response_ids", "loss_masks", "stop_reasons")),
            logprobs,
            strict=True,
        )
        made = [
            ConversationRow(prompt, Completion(ids, scores or None, reason, sampled=list(map(bool, mask))))
            for prompt, ids, mask, reason, scores in parts
        ]
        return list(zip(made, output["rewards"], strict=True))


class _Client:
    """SkyRL's client of its inference engines.

    SkyRL starts its trajectories in any order. Requests that wait together go to the engine in the order of the rows, so
    that findings are the same in every run.
    """

    def __init__(self, engine: Any, eos_token_ids: tuple[int, ...]) -> None:
        self.engine, self.eos_token_ids = engine, eos_token_ids
        self.waiting: list[tuple[list[int], asyncio.Event]] = []

    async def generate(self, batch: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:
        # The first error of a batch is raised. asyncio would print the others, in code that is long done.
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        params = batch["sampling_params"]
        request = {
            "temperature": params["temperature"],
            "top_p": params["top_p"],
            "top_k": max(params["top_k"], 0),
            "max_new_tokens": params["max_tokens"],
            "n": params.get("n", 1),
            "eos_token_ids": self.eos_token_ids,
            **{name: params[name] for name, none in FURTHER.items() if params.get(name, none) != none},
        }
        if params.get("stop"):
            request["stop_sequences"] = tuple(params["stop"])
        (prompt,), (session,) = batch["prompt_token_ids"], batch["session_ids"]
        await self._turn([int(part) for part in session.split("_")])
        (completion,) = await self.engine.agenerate(prompt, request)
        logprobs = completion.logprobs
        if completion.sampled is not None:
            raise NotProvided("an engine samples all tokens of an answer")
        return {
            "responses": [completion.text],
            "response_ids": [list(completion.token_ids)],
            "stop_reasons": [completion.finish_reason],
            "response_logprobs": None if logprobs is None else [list(logprobs)],
        }

    async def finish_session(self, session_id: str) -> None:
        """Do nothing: there is one engine."""

    async def _turn(self, place: list[int]) -> None:
        """Wait until the requests that came together and stand before this one have been sent."""
        turn = asyncio.Event()
        self.waiting.append((place, turn))
        if len(self.waiting) == 1:
            await asyncio.sleep(0)
            waiting, self.waiting = sorted(self.waiting, key=lambda each: each[0]), []
            for _, event in waiting:
                event.set()
        await turn.wait()


def _environment(replies: Callable[[Mapping[str, Any]], Callable[[str], Reply]]) -> Any:
    from skyrl_gym.envs.base_text_env import BaseTextEnv

    class Played(BaseTextEnv):  # type: ignore[misc]
        def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
            super().__init__()
            self.max_turns = extras["max_turns"]
            self.reply = replies(extras)

        def step(self, action: str) -> dict[str, Any]:
            self.turns += 1
            reply = self.reply(action)
            done = reply.ended or self.turns >= self.max_turns
            messages = [] if reply.ended else [dict(message) for message in reply.messages]
            return {"observations": messages, "reward": reply.reward, "done": done, "metadata": {}}

    return Played


def _prompted(tokenizer: Any, prompts: list[list[int]]) -> Any:
    """Copy the tokenizer, with a chat template that renders the number of an item to the ids of its prompt."""
    result = copy.copy(tokenizer)
    own = tokenizer.apply_chat_template

    def render(conversation: list[Mapping[str, Any]], **options: Any) -> Any:
        content = conversation[-1]["content"]
        return list(prompts[int(content)]) if content.isdigit() else own(conversation, **options)

    result.apply_chat_template = render
    return result
