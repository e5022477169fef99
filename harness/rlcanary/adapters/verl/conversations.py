"""verl's agent loop with tools, whose one tool is the environment of a conversation."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import part, quiet
from rlcanary.adapters.verl.runs import silent
from rlcanary.adapters.verl.settings import Settings
from rlcanary.adapters.verl.workers.agents import Remote, Server
from rlcanary.adapters.verl.workers.run_config import run_config
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.sampling import Sampling

if TYPE_CHECKING:
    from rlcanary.contract.records.conversations import ConversationOptions, Environment, Episode, Task

# Room for a conversation without a limit, and tools called at once.
ROOM, PARALLEL = 4096, 8


class Conversations(Settings):
    """Rollouts of several turns."""

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> list[list[Episode]]:
        wanted = Sampling(**options.sampling)
        if wanted.repetition_penalty != 1 or wanted.stop_sequences:
            raise NotProvided("the agent loop worker sets neither stop texts nor a repetition penalty")
        prompts = [
            tokenizer.apply_chat_template(task.messages, tokenize=True, return_dict=False, add_generation_prompt=True)
            for task in tasks
        ]
        longest = max(map(len, prompts))
        response = ROOM if options.max_tokens is None else options.max_tokens - longest
        if response < 1:
            raise NotProvided("a prompt as long as the row leaves no response")
        config = run_config(
            actor_rollout_ref__rollout={
                **{"name": "vllm", "prompt_length": longest, "response_length": response},
                "multi_turn": {"max_assistant_turns": options.max_turns, "max_parallel_calls": PARALLEL},
            }
        )
        requested = {
            **{"temperature": wanted.temperature, "top_p": wanted.top_p, "top_k": wanted.top_k or -1},
            **{"repetition_penalty": 1.0, "logprobs": True},
        }
        server = Room(engine, wanted.max_new_tokens, {"eos_token_ids": wanted.eos_token_ids}, longest + response)

        async def run() -> list[Any]:
            talks = [
                talk(config, tokenizer, server, environment, task, requested) for task in tasks for _ in range(wanted.n)
            ]
            return await asyncio.gather(*talks)

        with quiet(), silent():
            episodes = asyncio.run(run())
        if server.was_cut:
            raise NotProvided("verl limits the response as a whole, not each answer")
        return [episodes[place * wanted.n :][: wanted.n] for place in range(len(tasks))]


class Room(Server):
    """A server that gives an answer what its own limit and the room of the conversation leave, as verl's of vLLM does."""

    def __init__(self, engine: Any, limit: int, ends: Any, room: int) -> None:
        super().__init__(engine, limit, ends)
        self.room, self.was_cut = room, False

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: Any, **_: Any) -> Any:
        room = max(1, self.room - len(prompt_ids))
        output = await super().generate(
            request_id, prompt_ids, {**sampling_params, "max_tokens": min(room, self.limit)}
        )
        self.was_cut |= self.limit < room and self.last_reason == "length"
        return output


async def talk(
    config: Any, tokenizer: Any, server: Any, environment: Environment, task: Task, requested: dict[str, Any]
) -> Episode:
    """Have one conversation."""
    from verl.experimental.agent_loop import agent_loop as agents
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from rlcanary.contract.batch import Completion
    from rlcanary.contract.records.conversations import ConversationRow, Episode

    client = part("verl.workers.rollout.llm_server:LLMServerClient")
    loop = ToolAgentLoop(
        trainer_config=agents.DictConfigWrap(config),
        server_manager=client(config, Remote(server)),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=agents.DictConfigWrap(config.data),
    )
    replies = Replies(tokenizer, environment.start(task.id))
    loop.tool_parser, loop.tools = replies, {"reply": reply_tool()}
    output = await loop.run(dict(requested), raw_prompt=[dict(message) for message in task.messages])
    mask, ids = [bool(each) for each in output.response_mask], output.response_ids
    # A response that fills its room with an end of turn was not cut.
    is_cut = len(ids) >= loop.response_length and ids[-1] not in server.ends["eos_token_ids"]
    reason = "length" if is_cut else "stop"
    completion = Completion(ids, output.response_logprobs, reason, sampled=mask)
    # What a reward function is given for the calls of tools, and what it gives for the end.
    reward = sum(output.extra_fields["tool_rewards"]) + replies.last_reward
    return Episode(task.id, [ConversationRow(output.prompt_ids, completion)], reward)


class Replies:
    """A parser of tool calls that takes each answer as a call per message that the session replies."""

    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any, session: Any) -> None:
        self.tokenizer, self.session, self.last_reward = tokenizer, session, 0.0

    async def extract_tool_calls(self, ids: list[int], _: Any) -> tuple[str, list[Any]]:
        from verl.experimental.agent_loop.tool_parser import FunctionCall

        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        reply = self.session.reply(text)
        if reply.ended:
            self.last_reward = reply.reward
            return text, []
        if {message["role"] for message in reply.messages} != {"tool"} or len(reply.messages) > PARALLEL:
            raise NotProvided("the agent loop appends messages of tools only")
        rewards = [reply.reward, *[0.0] * (len(reply.messages) - 1)]
        given = [
            {"text": each["content"], "reward": reward} for each, reward in zip(reply.messages, rewards, strict=True)
        ]
        return text, [FunctionCall(name="reply", arguments=json.dumps(each)) for each in given]


def reply_tool() -> Any:
    """Make the tool that answers what it is called with."""
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import ToolResponse

    class Reply(BaseTool):  # type: ignore[misc]
        def __init__(self) -> None:
            self.tool_schema = None

        async def execute(self, _: str, parameters: dict[str, Any], **__: Any) -> tuple[Any, float, dict[str, Any]]:
            return ToolResponse(text=parameters["text"]), parameters["reward"], {}

    return Reply()
