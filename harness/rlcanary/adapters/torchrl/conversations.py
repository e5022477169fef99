"""torchrl's collector of whole conversations: a chat environment, a tool transform, and the wrapper of vLLM.

torchrl writes prompts in a template of its own where that of the tokenizer does not mark the assistant's tokens, as
`rendering.is_the_template` says. Here the wrapper is given the tokenizer's, so that the other checks see past it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcanary.adapters.frameworks import has_part, quiet
from rlcanary.adapters.torchrl.base import TorchrlBase
from rlcanary.adapters.torchrl.data import completion_of
from rlcanary.adapters.torchrl.rendering import plain_messages
from rlcanary.adapters.torchrl.vllm_engine import as_vllm, generate_kwargs, require_answers_by_ids
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.records.conversations import (
    ConversationOptions,
    ConversationRow,
    Environment,
    Episode,
    Message,
    Reply,
    Task,
)
from rlcanary.contract.sampling import Sampling


class Conversations(TorchrlBase):
    """Rollouts of several turns."""

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> list[list[Episode]]:
        """Have one conversation after the other, in an environment of batch size 1."""
        from itertools import islice

        from tensordict import NonTensorData, NonTensorStack, TensorDict, set_list_to_stack
        from torchrl.collectors.llm import LLMCollector
        from torchrl.envs import StepCounter
        from torchrl.envs.llm import ChatEnv
        from torchrl.modules.llm import vLLMWrapper

        require_answers_by_ids()
        request = Sampling(**options.sampling).with_ends(())
        if options.max_tokens is not None:
            raise NotProvided("torchrl bounds the turns of a conversation, not its tokens")
        eos = tokenizer.eos_token_id
        with quiet(), set_list_to_stack(True):
            rows = [
                TensorDict(
                    {
                        # torchrl's loader loses a History behind the first turn, and keeps what is no tensor.
                        "query": NonTensorStack(NonTensorData(_query(task.messages))),
                        "task": [str(number)],
                    },
                    batch_size=[1],
                )
                for number, task in enumerate(tasks)
                for _ in range(request.n)
            ]
            env = ChatEnv.from_dataloader(rows, batch_size=(1,), tokenizer=tokenizer)
            if options.max_turns is not None:
                env.append_transform(StepCounter(max_steps=options.max_turns))
            env.append_transform(session_tool(tasks, environment, tokenizer))
            policy = vLLMWrapper(
                as_vllm(engine, eos),
                tokenizer=tokenizer,
                generate_kwargs=generate_kwargs(request, eos),
                chat_template=tokenizer.chat_template,
            )
            collector = LLMCollector(env, policy=policy, yield_completed_trajectories=True)
            had = [list(batch.view(-1).unbind(0)) for batch in islice(collector, len(rows))]
        return [
            [_episode(task, turns, request) for turns in had if turns[0]["task"] == str(number)]
            for number, task in enumerate(tasks)
        ]


def _query(messages: Sequence[Message]) -> Any:
    """Return what the environment takes as a query: older ones take one text of the user's.

    Raises:
        NotProvided: it takes no such conversation.
    """
    plain = plain_messages(messages)
    if has_part("torchrl.envs.llm.chat:_is_chat_payload"):
        return plain
    if [each["role"] for each in plain] != ["user"]:
        raise NotProvided("the chat environment of this release begins with one message of the user")
    return plain[0]["content"]


def session_tool(tasks: list[Task], environment: Environment, tokenizer: Any) -> Any:
    """Make a tool of torchrl that plays the environment's sessions, and writes its rewards and ends."""
    import torch
    from torchrl.envs.llm.transforms.tools import ToolTransformBase

    class SessionTool(ToolTransformBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.session: Any = None

        def _process_batch_item(self, content: str, index: int) -> list[str] | None:
            self.reply: Reply = self.session.reply(content.removesuffix(tokenizer.eos_token))
            if any(message["role"] != self.tool_role for message in self.reply.messages):
                raise NotProvided(f"a tool's results have the role {self.tool_role!r}")
            return [message["content"] for message in self.reply.messages] if not self.reply.ended else None

        def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
            if self.session is None:
                self.session = environment.start(tasks[int(tensordict["task"][0])].id)
            next_tensordict = super()._step(tensordict, next_tensordict)
            next_tensordict["reward"] = torch.full((1, 1), self.reply.reward)
            done = next_tensordict["done"] | self.reply.ended
            next_tensordict.update({"done": done, "terminated": torch.full_like(done, self.reply.ended)})
            if done.all():
                self.session = None
            return next_tensordict

        def transform_reward_spec(self, reward_spec: Any) -> Any:
            from torchrl.data import Unbounded

            reward_spec["reward"] = Unbounded((*reward_spec.shape, 1))
            return reward_spec

    return SessionTool()


def _episode(task: Task, turns: Any, request: Sampling) -> Episode:
    rows = [ConversationRow(turn["tokens", "prompt"].tolist(), completion_of(turn, request)) for turn in turns]
    rewards = [float(turn["next", "reward"]) for turn in turns]
    return Episode(task.id, rows, sum(rewards), rewards, _messages(turns[-1]["next", "history"].prompt))


def _messages(history: Any) -> list[Message]:
    found: list[Mapping[str, Any]] = history.tolist(tolist_first=True)
    return [{"role": each["role"], "content": each["content"]} for each in found if each["role"] != "<none>"]
