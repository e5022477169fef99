"""verl's reward manager `dapo`: what a completion loses for its length."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.verl.workers.agents import numbered, scored
from rlcanary.adapters.verl.workers.run_config import new_config
from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.conventions import Conventions
    from rlcanary.contract.records.lengths import Lengths


def overlong_words(overlong_buffer: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the settings of the overlong buffer into conventions; none if it is switched off."""
    if not overlong_buffer:
        return {}
    return {"overlong_buffer": overlong_buffer["len"], "overlong_penalty": overlong_buffer["penalty_factor"]}


def overlong_settings(wanted: Conventions) -> dict[str, Any]:
    """Translate conventions into the settings of the overlong buffer, none if it is off."""
    if wanted.overlong_buffer is None:
        return {}
    return {"len": wanted.overlong_buffer, "penalty_factor": wanted.overlong_penalty}


def shaped_rewards(rewards_B: Tensor, lengths: Lengths, overlong_buffer: Mapping[str, Any]) -> Tensor:
    """Have the reward manager score completions of these lengths whose own rewards are given -> [B].

    Raises:
        NotProvided: the overlong buffer is switched off, as it is by default.
    """
    import torch
    from verl import DataProto

    if not overlong_buffer:
        raise NotProvided("the reward manager's overlong buffer is switched off")
    n_rows = len(rewards_B)
    is_prompt_BP = torch.arange(lengths.max_prompt_tokens) >= lengths.max_prompt_tokens - lengths.prompts.unsqueeze(1)
    is_response_BT = torch.arange(lengths.max_new_tokens) < lengths.completions.unsqueeze(1)
    tensors = {
        "prompts": torch.full((n_rows, lengths.max_prompt_tokens), 5),
        "responses": torch.full((n_rows, lengths.max_new_tokens), 5),
        "attention_mask": torch.cat([is_prompt_BP, is_response_BT], dim=1).long(),
    }
    rewards = scored(
        DataProto.from_dict(tensors=tensors, non_tensors=numbered(n_rows)),
        lambda *_, **__: "",
        lambda ground_truth, **_: float(rewards_B[ground_truth]),
        _shaping_config(lengths.max_new_tokens, tuple(overlong_buffer.items())),
    )
    return torch.tensor([float(each) for each in rewards])


@lru_cache(maxsize=16)
def _shaping_config(max_new_tokens: int, overlong_buffer: tuple[tuple[str, Any], ...]) -> Any:
    from omegaconf import open_dict

    config = new_config(reward={"custom_reward_function.path": "given", "reward_manager.name": "dapo"})
    buffer = {"enable": True, "log": False, **dict(overlong_buffer)}
    with open_dict(config.reward):
        config.reward.reward_kwargs = {"max_resp_len": max_new_tokens, "overlong_buffer_cfg": buffer}
    return config
