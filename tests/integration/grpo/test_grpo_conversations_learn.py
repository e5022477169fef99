"""Conversations with a tool are learned from: environment, assistant masks, group advantages and the loss, end to end."""

import asyncio
from statistics import fmean
from typing import Any

import torch

from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.presets import GRPO
from rlcanary.grpo.data.datasets import Row
from rlcanary.grpo.engines.containers import Masks
from rlcanary.grpo.engines.transformers_policy import TransformersPolicy
from rlcanary.grpo.rewards.verifier import Score
from rlcanary.grpo.rollout.chat import render_chats
from rlcanary.grpo.rollout.environment import ChatEnvironment, Conversation, trajectory
from rlcanary.grpo.rollout.group_assembler import GroupAssembler
from rlcanary.reference import advantages, policy_loss
from rlcanary.tiny_models import tiny_chat_tokenizer, tiny_llama

GROUP, STEPS = 8, 35
SAMPLING = {"max_new_tokens": 4}


class Digits:
    """A verifier: the share of digits in an answer."""

    bounds = (0.0, 1.0)

    def verify(self, completion: str, target: Any) -> Score:
        return Score(sum(letter.isdigit() for letter in completion) / 4)


class Nudge:
    """A tool that replies to every answer."""

    def reply(self, answer: str) -> str | None:
        return "four"


def padded(rows: list[torch.Tensor], value: float) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def test_reward_of_the_last_turn_is_learned_and_only_sampled_tokens_are_trained() -> None:
    tokenizer = tiny_chat_tokenizer()
    model = tiny_llama(vocabulary=len(tokenizer))
    policy = TransformersPolicy(model, tokenizer, seed=0, eos_token_ids=[tokenizer.eos_token_id])
    rows = [Row("a", "hello", "", verifier="digits"), Row("b", "yes", "", verifier="digits")]
    where = ChatEnvironment(rows, tokenizer, {"digits": Digits()}, tools=[Nudge()], max_turns=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)

    async def played() -> list[Conversation]:
        return await asyncio.gather(*(where.play(policy, row, SAMPLING) for row in rows for _ in range(GROUP)))

    rewards = []
    for step in range(STEPS):
        conversations = asyncio.run(played())
        assembler = GroupAssembler(GROUP)
        groups = [group for each in conversations if (group := assembler.add(trajectory(each, tokenizer, epoch=step)))]
        assert len(groups) == 2
        assert assembler.clear() == []
        chats = render_chats([each.messages for each in conversations], tokenizer)
        masks: Masks = chats.masks
        scored = policy.logprobs(chats.tokens, masks, "assistant")
        per_row = [advantages(torch.tensor(group.rewards), torch.zeros(GROUP), GRPO) for group in groups]
        per_token = [value.repeat(len(row)) for value, row in zip(torch.cat(per_row), scored.response, strict=True)]
        batch = PolicyBatch(
            padded(list(scored.response), torch.nan),
            padded(list(chats.logprobs.response), torch.nan),
            padded(per_token, 0.0),
            masks.padded()[1],
        )
        output = policy_loss(batch, GRPO)
        # On policy the ratio is 1 for every trained token: what is scored is what was sampled, in both turns.
        assert abs(output.metrics["ratio_max"] - 1) < 1e-3
        assert abs(output.metrics["ratio_min"] - 1) < 1e-3
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        rewards.append(fmean(each.step_rewards[-1] for each in conversations))
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.25
