"""open-instruct's conversations: an environment of the checks as a text environment in a pool of the sampler's."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import open_instruct_run as run
import open_instruct_sampler as sampling_of
from open_instruct_objective import Objective

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import Completion
from rlcanary.contract.records.conversations import ConversationRow, Episode

if TYPE_CHECKING:
    from rlcanary.contract.records.conversations import ConversationOptions, Environment, Task

NAME, UNLIMITED, TURNS = "environment", 1_000_000, 1_000


class Conversations(Objective):
    """Rollouts of several turns."""

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> list[list[Episode]]:
        from open_instruct.data_types import EnvConfig, EnvConfigEntry

        config = sampling_of.request_of(engine, options.sampling)
        prompts = [_prompt(task, tokenizer) for task in tasks]
        limit = UNLIMITED if options.max_tokens is None else options.max_tokens
        actor = sampling_of.sampler(
            engine,
            run.dataset_of(prompts),
            sampling_of.reward_config(self.configs(reward_aggregator="sum").streaming, {}),
            limit,
            pools={NAME: _pool(environment)},
            per_turn_max_tokens=config.max_tokens,
            tool_parser=_parser(),
        )
        actor.llm_engine.tokenizer = tokenizer
        config = dataclasses.replace(config, max_tokens=UNLIMITED)
        requests = []
        for number, task in enumerate(tasks):
            entry = EnvConfigEntry(NAME, is_text_env=True, kwargs={"task_id": task.id})
            turns = TURNS if options.max_turns is None else options.max_turns
            env_config = EnvConfig(max_steps=turns, env_configs={NAME: entry})
            requests.append(_request(number, prompts[number], config, env_config))
        try:
            results = sampling_of.answered(actor, requests)
        except DeclinedError as declined:
            raise NotProvided(str(declined)) from None
        return [_episodes(task, prompt, result) for task, prompt, result in zip(tasks, prompts, results, strict=True)]


def _request(number: int, prompt: list[int], config: Any, env_config: Any) -> Any:
    from open_instruct.data_types import PromptRequest

    return PromptRequest(prompt, config, number, f"0_{number}", env_config=env_config)


def _prompt(task: Task, tokenizer: Any) -> list[int]:
    """Run the tokenisation of prompts on the task's messages."""
    from open_instruct import dataset_transformation as data

    row: dict[str, Any] = {
        data.DEFAULT_SFT_MESSAGES_KEY: [dict(message) for message in task.messages],
        data.GROUND_TRUTHS_KEY: "",
        data.VERIFIER_SOURCE_KEY: "",
    }
    found: list[int] = data.rlvr_tokenize_v3(row, tokenizer)[data.INPUT_IDS_PROMPT_KEY]
    return found


def _parser() -> Any:
    """Make the parser of Olmo 3 for a tokenizer with other marks of turns, whose turns of tools are called so."""
    from open_instruct.environments.tools.parsers import VLLM_PARSERS, VllmToolParser

    config = VLLM_PARSERS["vllm_olmo3"]

    def marked(text: str, role: str = "") -> str:
        return text.replace("<|im_start|>user", f"<|im_start|>{role}").replace("im_", "")

    turn = config.role_templates["user"]
    calls_nothing = SimpleNamespace(extract_tool_calls=lambda **_: SimpleNamespace(tools_called=False))
    parser = VllmToolParser(
        calls_nothing,
        {role: marked(turn, role) for role in ("user", "tool")},
        output_prefix=config.output_prefix,
        output_postfix=marked(config.output_postfix),
    )
    parser._make_request = lambda: None
    return parser


def _pool(environment: Environment) -> Any:
    """Make a pool of environments, each of which is a session of the environment from its reset on."""

    class Actor:
        def __init__(self) -> None:
            self.session: Any = None

        async def reset(self, task_id: Any) -> tuple[Any, list[Any]]:
            self.session = environment.start(task_id)
            return None, []

        async def get_response_role(self) -> str:
            return "tool"

        async def get_metrics(self) -> dict[str, float]:
            return {}

        async def step(self, call: Any) -> Any:
            from open_instruct.environments.base import StepResult

            reply = self.session.reply(call.args["text"])
            if len(reply.messages) > 1 or any(message["role"] != "tool" for message in reply.messages):
                raise DeclinedError("a text environment replies with one message")
            text = reply.messages[0]["content"] if reply.messages else ""
            return StepResult(result=text, reward=reply.reward, done=reply.ended)

    async def acquire() -> Any:
        actor = Actor()
        names = ("reset", "get_response_role", "get_metrics", "step")
        return SimpleNamespace(**{name: _remote(getattr(actor, name)) for name in names})

    return SimpleNamespace(acquire=_remote(acquire), release=SimpleNamespace(remote=lambda _: None))


def _remote(call: Callable[..., Awaitable[Any]]) -> Any:
    return SimpleNamespace(remote=call)


class DeclinedError(BaseException):
    """What the adapter declines within a step, whose exceptions open-instruct tells the policy."""


def _episodes(task: Task, prompt: list[int], result: Any) -> list[Episode]:
    episodes = []
    for number, ids in enumerate(result.responses):
        completion = Completion(
            ids,
            result.logprobs[number],
            result.finish_reasons[number],
            sampled=[bool(each) for each in result.masks[number]],
        )
        state = result.request_info.rollout_states[number]
        episodes.append(
            Episode(task.id, [ConversationRow(prompt, completion)], result.reward_scores[number], state["rewards"])
        )
    return episodes
