"""Mistakes in batches, masks, scoring, updates, evaluation, rewards, rendering and data order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlcanary.bugs.mistakes.planting import Function, Patches
from rlcanary.contract.batch import CollatedBatch, Group
from rlcanary.tiny_models import BOS_ID


def _collated(change: Callable[[CollatedBatch, int], dict[str, Any]]) -> Patches:
    """Patch a batch that is made from groups and the padding id."""

    def patch(exact: Function) -> Function:
        def make_batch(groups: list[Group], pad_token_id: int) -> CollatedBatch:
            batch: CollatedBatch = exact(groups, pad_token_id)
            return replace(batch, **change(batch, pad_token_id))

        return make_batch

    return {"adapter.make_batch": patch}


def _masked(change: Callable[[Tensor, Tensor, Sequence[int], int], Tensor]) -> Patches:
    """Patch the mask of completions, made from the right mask, the ids, the ids that end one and the padding id."""
    return {
        "adapter.completion_mask": lambda exact: lambda ids, ends, pad: change(exact(ids, ends, pad), ids, ends, pad)
    }


def _scored_from(change: Callable[[CollatedBatch], dict[str, Any]]) -> Patches:
    """Patch the forward pass of all scoring to read a changed batch."""

    def patch(exact: Function) -> Function:
        return lambda model, batch, *rest: exact(model, replace(batch, **change(batch)), *rest)

    return {f"logprobs.{name}": patch for name in ("completion_logprobs", "completion_scores", "packed_logprobs")}


def _by_model(change: Callable[[Tensor], Tensor]) -> Patches:
    """Patch the forward pass of all scoring to read changed logits."""

    def patch(exact: Function) -> Function:
        def call(model: Any, *given: Any) -> Any:
            def changed(**inputs: Any) -> Any:
                return SimpleNamespace(logits=change(model(**inputs).logits))

            return exact(changed, *given)

        return call

    return {f"logprobs.{name}": patch for name in ("completion_logprobs", "completion_scores")}


def _updated(change: Callable[[Any, CollatedBatch], tuple[Any, CollatedBatch]]) -> Patches:
    """Patch the update to read another state or batch."""
    return {"adapter.train_step": lambda exact: lambda state, batch: exact(*change(state, batch))}


def _logged(change: Callable[[dict[str, float], CollatedBatch], dict[str, float]]) -> Patches:
    def patch(exact: Function) -> Function:
        def train_step(state: Any, batch: CollatedBatch) -> dict[str, float]:
            metrics = exact(state, batch)
            return {**metrics, **change(metrics, batch)}

        return train_step

    return {"adapter.train_step": patch}


def _scored_at(name: str) -> Patches:
    """Patch the update to take one kind of logprobs at temperature 1."""

    def patch(exact: Function) -> Function:
        def policy_batch(model: Any, ref_model: Any, batch: CollatedBatch, conventions: Any) -> Any:
            at_one = exact(model, ref_model, batch, conventions.replace(temperature=1.0))
            return replace(exact(model, ref_model, batch, conventions), **{name: getattr(at_one, name)})

        return policy_batch

    return {"step.policy_batch": patch}


def _evaluated(change: Callable[[Any], Any]) -> Patches:
    """Patch an evaluation to read another state, or one that it changes."""
    return {"adapter.evaluate": lambda exact: lambda state: exact(change(state))}


def _rewarded(change: Callable[[Any], float | None]) -> Patches:
    def patch(exact: Function) -> Function:
        return lambda item, text: exact(replace(item, reward=lambda read: change(item.reward(read))), text)

    return {"scoring._reward": patch}


def _messages(change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Patches:
    """Patch rendering to read changed messages; None drops one."""

    def patch(exact: Function) -> Function:
        return lambda messages, *others: exact(
            [changed for message in messages if (changed := change(dict(message))) is not None], *others
        )

    return {"adapter.render": patch}


def _rendered(change: Callable[[list[int], list[bool], Any], tuple[list[int], list[bool]]]) -> Patches:
    def patch(exact: Function) -> Function:
        def render(messages: Any, tokenizer: Any, *tools: Any) -> tuple[list[int], list[bool]]:
            ids, trained = exact(messages, tokenizer, *tools)
            return change(ids, trained, tokenizer)

        return render

    return {"adapter.render": patch}


def _ordered(change: Callable[..., tuple[int, int, int, int]]) -> Patches:
    return {"adapter.data_order": lambda exact: lambda *given: exact(*change(*given))}


def _steps(change: Callable[..., tuple[int, int, int, int]]) -> Patches:
    return {"adapter.accumulation_steps": lambda exact: lambda *given: exact(*change(*given))}


def _other(speaker: str, **changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda message: {**message, **changes} if message["role"] == speaker else message


def _trained_padding(batch: CollatedBatch) -> CollatedBatch:
    """Train every position; the padding's logprobs are 0, as tensors are padded."""
    old, ref = (None if values is None else values.nan_to_num(0) for values in (batch.old_logprobs, batch.ref_logprobs))
    mask_BT = torch.ones_like(batch.completion_mask)
    return replace(batch, completion_mask=mask_BT, old_logprobs=old, ref_logprobs=ref)


def _evaluation_mode(state: Any) -> Any:
    state.model.eval()
    return state


def _schedule_moved(state: Any) -> Any:
    state.scheduler.step()
    return state


UNCHECKED: Patches = {"logprobs._check_places": lambda _: lambda _batch: None}
"""Lets a mistake score what the oracle refuses."""

# Each mistake patches capabilities or functions of the oracle by name.
TRAINING_MISTAKES: dict[str, Patches] = {
    "padding is found by its id": _collated(lambda batch, pad: {"completion_mask": batch.completion_ids != pad}),
    "tool tokens are trained": _collated(
        lambda batch, _: {
            "completion_mask": batch.completion_mask.flip(1).cumsum(1).flip(1) > 0,
        }
    ),
    "the batch's mask is one token late": _collated(
        lambda batch, _: {"completion_mask": torch.nn.functional.pad(batch.completion_mask, (1, 0))[:, :-1]}
    ),
    "the batch's mask is one token early": _collated(
        lambda batch, _: {"completion_mask": torch.nn.functional.pad(batch.completion_mask, (0, 1))[:, 1:]}
    ),
    "the batch attends to its padding": _collated(
        lambda batch, _: {"attention_mask": torch.ones_like(batch.attention_mask)}
    ),
    "the batch's sampler logprobs are one token late": _collated(
        lambda batch, _: {"old_logprobs": None if batch.old_logprobs is None else batch.old_logprobs.roll(1, dims=1)}
    ),
    "the batch's rewards are those of the previous row": _collated(lambda batch, _: {"rewards": batch.rewards.roll(1)}),
    "the batch's rewards are those of the next row": _collated(lambda batch, _: {"rewards": batch.rewards.roll(-1)}),
    "all rows of the batch are one group": _collated(lambda batch, _: {"group_ids": torch.zeros_like(batch.group_ids)}),
    "the end of a completion is not in its mask": _masked(
        lambda mask, ids, ends, _: mask & ~torch.isin(ids, torch.tensor(list(ends), dtype=ids.dtype))
    ),
    "the mask is made from the padding's id": _masked(lambda _, ids, __, pad: ids != pad),
    "everything is in the mask": _masked(lambda mask, *_: torch.ones_like(mask)),
    "one token behind the end is in the mask": _masked(
        lambda mask, *_: mask | torch.nn.functional.pad(mask, (1, 0), value=True)[:, :-1]
    ),
    "only the first id that ends a completion is known": {
        "adapter.completion_mask": lambda exact: lambda ids, ends, pad: exact(ids, list(ends)[:1], pad)
    },
    "only the last id that ends a completion is known": {
        "adapter.completion_mask": lambda exact: lambda ids, ends, pad: exact(ids, list(ends)[-1:], pad)
    },
    "padding is attended to when tokens are scored": _scored_from(
        lambda batch: {"attention_mask": torch.ones_like(batch.attention_mask)}
    ),
    "the attention mask is made from the token ids": {
        **_scored_from(lambda batch: {"attention_mask": batch.input_ids.bool()}),
        **UNCHECKED,
    },
    "position ids count the padding when tokens are scored": _scored_from(
        lambda batch: {"position_ids": torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)}
    ),
    "position ids are one too large when tokens are scored": _scored_from(
        lambda batch: {"position_ids": batch.position_ids + 1}
    ),
    "each token is scored by the logits of its own position": _by_model(lambda logits: logits.roll(-1, dims=1)),
    "each token is scored by the logits two positions before": _by_model(lambda logits: logits.roll(1, dims=1)),
    "tokens are scored in bfloat16": _by_model(lambda logits: logits.bfloat16().to(logits.dtype)),
    "the reference is scored with the policy's weights": _updated(
        lambda state, batch: (replace(state, ref_model=state.model), replace(batch, ref_logprobs=None))
    ),
    "the reference logprobs of the batch are not used": _updated(
        lambda state, batch: (state, replace(batch, ref_logprobs=None))
    ),
    "the sampler's logprobs are not used in the update": {
        "step.policy_batch": lambda exact: lambda *given: exact(*given[:-1], given[-1].replace(old_logprobs="trainer"))
    },
    "the update trains the padding": {
        **_updated(lambda state, batch: (state, _trained_padding(batch))),
        **UNCHECKED,
    },
    **{
        f"{told} are scored without the temperature in the update": _scored_at(name)
        for name, told in {
            "logprobs": "the policy's logprobs",
            "old_logprobs": "the old logprobs",
            "ref_logprobs": "the reference's logprobs",
        }.items()
    },
    "the logged learning rate is 0": _logged(lambda *_: {"lr": 0.0}),
    "the logged number of tokens leaves out the prompts": _logged(
        lambda _, batch: {"tokens": float(batch.completion_mask.sum())}
    ),
    "the logged number of tokens counts the padding": _logged(
        lambda _, batch: {"tokens": float(batch.attention_mask.numel())}
    ),
    "the logged reward is a sum": _logged(lambda _, batch: {"reward": float(batch.rewards.sum())}),
    "the model is left in evaluation mode": _evaluated(_evaluation_mode),
    "an evaluation moves the learning-rate schedule": _evaluated(_schedule_moved),
    "an evaluation counts only rewards of exactly 1": _evaluated(
        lambda state: replace(
            state,
            eval_items=[
                replace(item, reward=lambda text, item=item: float(item.reward(text) == 1.0))
                for item in state.eval_items
            ],
        )
    ),
    "an evaluation leaves out the last item": _evaluated(
        lambda state: replace(state, eval_items=list(state.eval_items)[:-1])
    ),
    "a completion that cannot be scored has reward 0": _rewarded(lambda reward: 0.0 if reward is None else reward),
    "a reward of 0 counts as missing": _rewarded(lambda reward: reward or None),
    "rewards are rounded to whole numbers": _rewarded(lambda reward: None if reward is None else float(int(reward))),
    "negative rewards count as 0 when they are scored": _rewarded(
        lambda reward: None if reward is None else max(reward, 0.0)
    ),
    "each completion has the reward of the next": {
        "adapter.score": lambda exact: lambda items, texts: exact(items, [*texts[1:], *texts[:1]])
    },
    "all completions are scored by the first item": {
        "adapter.score": lambda exact: lambda items, texts: exact([items[0]] * len(items) if items else items, texts)
    },
    "the system prompt is dropped": _messages(lambda message: None if message["role"] == "system" else message),
    "the system prompt is empty": _messages(_other("system", content="")),
    "tool answers are empty": _messages(_other("tool", content="")),
    "tool answers are written as user turns": _messages(_other("tool", role="user")),
    "all assistant turns are trained, history included": _messages(
        lambda message: {**message, "sampled": True} if message["role"] == "assistant" else message
    ),
    "no turn is trained": _messages(lambda message: {**message, "sampled": False}),
    "sampled turns are encoded again from their text": _messages(
        lambda message: {name: value for name, value in message.items() if name != "token_ids"}
    ),
    "a BOS precedes the one of the template": _rendered(lambda ids, flags, _: ([BOS_ID, *ids], [False, *flags])),
    "the BOS of the template is lost": _rendered(
        lambda ids, flags, _: (ids[1:], flags[1:]) if ids[:1] == [BOS_ID] else (ids, flags)
    ),
    "the ends of turns are not trained": _rendered(
        lambda ids, flags, tokenizer: (
            ids,
            [flag and token != tokenizer.eos_token_id for token, flag in zip(ids, flags, strict=True)],
        )
    ),
    "the whole conversation is trained": _rendered(lambda ids, flags, _: (ids, [True] * len(flags))),
    "the mask of the conversation is one token late": _rendered(lambda ids, flags, _: (ids, [False, *flags[:-1]])),
    "the mask of the conversation is one token early": _rendered(lambda ids, flags, _: (ids, [*flags[1:], False])),
    "every epoch has the order of the first": _ordered(lambda n, _, rank, world: (n, 0, rank, world)),
    "every rank has the items of the first": _ordered(lambda n, epoch, _, world: (n, epoch, 0, world)),
    "every rank has all items": _ordered(lambda n, epoch, *_: (n, epoch, 0, 1)),
    "items that do not fill all ranks are dropped": _ordered(
        lambda n, epoch, rank, world: (max(n // world * world, 1), epoch, rank, world)
    ),
    "sequence-parallel ranks count as data-parallel ones": _steps(
        lambda rows, micro, ranks, _: (rows, micro, ranks, 1)
    ),
    "the number of ranks is ignored in the steps": _steps(lambda rows, micro, *_: (rows, micro, 1, 1)),
    "the micro-batch size is ignored in the steps": _steps(lambda rows, _, ranks, shared: (rows, 1, ranks, shared)),
    "groups without signal are kept": {"adapter.keep_group": lambda _: lambda _rewards: True},
    "groups are kept if their standard deviation is not 0": {
        "adapter.keep_group": lambda _: lambda rewards: bool(rewards.std() > 0)
    },
    "groups are kept if a reward is above 0": {
        "adapter.keep_group": lambda _: lambda rewards: bool((rewards > 0).any())
    },
    "groups are kept if their mean is between 0 and 1": {
        "adapter.keep_group": lambda _: lambda rewards: 0 < float(rewards.mean()) < 1
    },
}
