"""torchrl's collector: a chat environment that loads the items, the wrapper of vLLM, and a reward parser."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.torchrl.base import TorchrlBase
from rlcanary.adapters.torchrl.data import completion_of
from rlcanary.adapters.torchrl.vllm_engine import as_vllm, generate_kwargs, require_answers_by_ids
from rlcanary.contract.adapter import Item, NotProvided
from rlcanary.contract.batch import Group
from rlcanary.contract.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor


class Rollouts(TorchrlBase):
    """Completions of items, and their rewards."""

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        """Collect one dialog turn per completion, as torchrl's recipe for GSM8K does."""
        from tensordict import set_list_to_stack
        from torchrl.collectors.llm import LLMCollector
        from torchrl.envs import StepCounter
        from torchrl.modules.llm import vLLMWrapper

        require_answers_by_ids()
        request = Sampling(**sampling).with_ends(())
        if request.stop_sequences:
            raise NotProvided("a rollout has no finish reason, and an end at a stop text no EOS that tells of it")
        tokenizer = prompted(engine.tokenizer, {text_of(item): list(item.prompt_ids) for item in items})
        turns = len(items) * request.n
        collectors: list[Any] = []
        with quiet(), set_list_to_stack(True):
            env = environment_of(items, tokenizer, repeats=request.n)
            env.append_transform(StepCounter(max_steps=1))
            env.append_transform(item_reward(items, tokenizer))
            eos = tokenizer.eos_token_id
            model = as_vllm(engine, eos, on_sync=lambda: collectors[0].increment_version())
            policy = vLLMWrapper(model, tokenizer=tokenizer, generate_kwargs=generate_kwargs(request, eos))
            collectors.append(
                LLMCollector(
                    env,
                    policy=policy,
                    dialog_turns_per_batch=turns,
                    total_dialog_turns=turns,
                    track_policy_version=True,
                )
            )
            start = engine.version
            (batch,) = collectors[0]
            rows = list(batch.view(-1).unbind(0))
        groups = []
        for number, item in enumerate(items):
            own = [row for row in rows if row["answer"] == _answer(number)]
            groups.append(
                Group(
                    own[0]["tokens", "prompt"].tolist(),
                    [completion_of(row, request) for row in own],
                    [float(row["next", "reward"]) for row in own],
                    item_id=item.id,
                    policy_version=start + min(int(row["next", "policy_version"]) for row in own),
                )
            )
        return groups

    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        """Step the environment with the completions as the assistant's messages, and read the parser's rewards."""
        with quiet():
            turn = answered(_rows(items), completions, item_reward(items, None))
        return turn["next", "reward"].flatten()  # type: ignore[no-any-return]


def answered(rows: list[dict[str, str]], completions: Sequence[str], parser: Any) -> Any:
    """Step a chat environment of these rows of a dataset and this reward parser with an answer to each of them."""
    from tensordict import lazy_stack, set_list_to_stack
    from torchrl.data.llm import History

    with set_list_to_stack(True):
        env = _environment(rows, None, repeats=1)
        env.append_transform(parser)
        turn = env.reset()
        prompts = turn["history"].prompt.unbind(0)
        answers = [History(role="assistant", content=text) for text in completions]
        turn["history"].full = lazy_stack(
            [prompt.append(answer, inplace=False) for prompt, answer in zip(prompts, answers, strict=True)]
        )
        return env.step(turn)


def text_of(item: Item) -> str:
    """Return the text that stands for an item's prompt in the dataset: torchrl renders its prompts from text."""
    return " ".join(map(str, item.prompt_ids))


def prompted(tokenizer: Any, prompts: Mapping[str, Sequence[int]]) -> Any:
    """Copy the tokenizer, with a chat template that renders each text to the given ids."""
    result = copy.copy(tokenizer)

    def render(conversation: list[Mapping[str, Any]], tokenize: bool = True, **_: Any) -> Any:
        from torch import tensor
        from transformers import BatchEncoding

        ids = list(prompts[conversation[-1]["content"]])
        mask = [1] * len(ids)
        if not tokenize:
            return tokenizer.decode(ids)
        return BatchEncoding({"input_ids": tensor([ids]), "attention_mask": tensor([mask])})

    result.apply_chat_template = render
    return result


def item_reward(items: Sequence[Item], tokenizer: Any) -> Any:
    """Make torchrl's reward parser with the items' own functions in the place of its comparison of numbers."""
    from tensordict import TensorDict
    from torchrl.envs.llm import GSM8KRewardParser

    class ItemReward(GSM8KRewardParser):  # type: ignore[misc]
        @staticmethod
        def extract_tags(text: str) -> tuple[str, str]:
            return "", text

        def _single_correctness_reward(self, true_answer: str, potential_answer: str, cot: str) -> Any:
            reward = items[int(true_answer)].reward(potential_answer)
            parts = dict.fromkeys(("reward_answer", "reward_think", "reward_right"), 1.0)
            value = float("nan") if reward is None else float(reward)
            return TensorDict({**parts, "reward": value, "success": True})

    return ItemReward(tokenizer=tokenizer)


def environment_of(items: Sequence[Item], tokenizer: Any, repeats: int) -> Any:
    """Make a chat environment that takes all items at once, each several times."""
    return _environment(_rows(items), tokenizer, repeats)


def _rows(items: Sequence[Item]) -> list[dict[str, str]]:
    return [{"query": text_of(item), "answer": _answer(number)} for number, item in enumerate(items)]


def _environment(rows: list[dict[str, str]], tokenizer: Any, repeats: int) -> Any:
    from torch import Generator
    from torch.utils.data import DataLoader
    from torchrl.envs.llm import ChatEnv

    # With a generator of its own, as torchrl makes those of datasets.
    loader: Any = DataLoader(rows, batch_size=1, generator=Generator())  # type: ignore[arg-type]
    return ChatEnv.from_dataloader(loader, repeats=repeats, batch_size=(len(rows) * repeats,), tokenizer=tokenizer)


def _answer(number: int) -> str:
    """Write the number of an item as GSM8K writes its answers."""
    return f"#### {number}"
