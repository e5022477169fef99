"""Collating sampled groups into one rectangular batch, in a few fixed shapes so that compiled kernels are reused.

Shapes: B rows (completions), S sequence positions, T completion positions.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rlcanary.contract.batch import CollatedBatch, Completion, Group
from rlcanary.reference.masks import lengths_to_mask


@dataclass(frozen=True)
class BatchStats:
    """Lengths, rewards and datasets of a batch, after clamping.

    Attributes:
        prompt_lens: tokens of each row's prompt.
        completion_lens: tokens of each row's completion that are in the batch.
        padded_sequence_len: S.
        padded_completion_len: T.
        finish_reasons: number of completions per finish reason; "clamped" counts the completions cut by this batch.
        rewards: the reward of each row.
        datasets: number of rows from each dataset.
    """

    prompt_lens: list[int]
    completion_lens: list[int]
    padded_sequence_len: int
    padded_completion_len: int
    finish_reasons: dict[str, int]
    rewards: list[float]
    datasets: dict[str, int]

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each row, prompt and completion."""
        return [prompt + completion for prompt, completion in zip(self.prompt_lens, self.completion_lens, strict=True)]

    @property
    def padding_fraction(self) -> float:
        """Share of the B × S positions that hold no token."""
        return 1 - sum(self.seq_lens) / (len(self.prompt_lens) * self.padded_sequence_len)


@dataclass
class RewardStats:
    """Running reward statistics over groups.

    Attributes:
        correct: a completion is correct from this reward on.
        wrong: a completion is wrong up to this reward.
    """

    correct: float = 1.0
    wrong: float = 0.0
    _groups: list[tuple[list[float], bool]] = field(default_factory=list, init=False, repr=False)

    def record(self, rewards: Sequence[float], used: bool) -> None:
        """Add the rewards of one group; `used` says whether it was trained on.

        Raises:
            ValueError: the group has no completion.
        """
        if len(rewards) == 0:
            raise ValueError("a group without completions has no rewards to record")
        self._groups.append(([float(reward) for reward in rewards], used))

    def get_metrics(self) -> dict[str, float]:
        """Return the means since the last call, and start anew.

        Returns:
            `reward_overall`, over completions; `frac_all_correct` and `frac_all_wrong`, over groups; and `reward_used`,
            over the completions of used groups, where there are any. Empty if nothing was recorded. NaN rewards are
            neither correct nor wrong and make the means NaN.
        """
        groups, self._groups = self._groups, []
        if not groups:
            return {}
        every = [reward for rewards, _ in groups for reward in rewards]
        all_correct = [all(reward >= self.correct for reward in rewards) for rewards, _ in groups]
        all_wrong = [all(reward <= self.wrong for reward in rewards) for rewards, _ in groups]
        used = [reward for rewards, was_used in groups if was_used for reward in rewards]
        metrics = {
            "reward_overall": sum(every) / len(every),
            "frac_all_correct": sum(all_correct) / len(groups),
            "frac_all_wrong": sum(all_wrong) / len(groups),
        }
        if used:
            metrics["reward_used"] = sum(used) / len(used)
        return metrics


def make_batch(
    groups: Sequence[Group],
    pad_token_id: int,
    seq_len_buckets: Sequence[int] | None = None,
    completion_len_buckets: Sequence[int] | None = None,
    prompt_padding: Literal["right", "left"] = "right",
    mask_truncated: bool = False,
) -> tuple[CollatedBatch, BatchStats]:
    """Collate the completions of groups into one batch, one row each, groups in order.

    The completion width T is the first completion bucket that holds the longest completion, or the last bucket; the
    sequence width S is the first sequence bucket that holds the longest prompt and T, or the last. If the last sequence
    bucket is too small, T shrinks to what is left beside the longest prompt, and longer completions are cut there and
    counted as clamped. Without buckets the widths are the natural ones.

    Args:
        groups: at least one, each with as many rewards as completions.
        pad_token_id: fills the padding; it may equal any id, since masks come from lengths.
        seq_len_buckets: widths for S, in tokens.
        completion_len_buckets: widths for T, in tokens.
        prompt_padding: "right" keeps prompt and completion together and pads behind them; "left" pads in front of the
            prompts, so that all completions start at the same position.
        mask_truncated: leave out of the mask all tokens of the completions that ended at their limit or are cut here.

    Raises:
        ValueError: no group, an empty prompt, a group whose rewards, versions or logprobs do not match its completions,
            reference logprobs on some groups only, a bucket below 1, or prompts that leave no room for a completion.
    """
    _check(groups)
    for bucket in (*(seq_len_buckets or ()), *(completion_len_buckets or ())):
        if bucket < 1:
            raise ValueError(f"a bucket of {bucket} tokens holds nothing")
    rows = [(group, completion) for group in groups for completion in group.completions]
    longest_prompt = max(len(group.prompt_ids) for group in groups)
    longest_completion = max(len(completion.token_ids) for _, completion in rows)
    width = _bucket(longest_completion, completion_len_buckets)
    length = _bucket(longest_prompt + width, seq_len_buckets)
    if length < longest_prompt + width:
        width = length - longest_prompt
        if width < 1:
            raise ValueError(
                f"a prompt of {longest_prompt} tokens leaves no room for its completion in the largest sequence bucket, "
                f"{length}: drop or shorten such prompts, or add a larger bucket"
            )

    prompt_lens_B = torch.tensor([len(group.prompt_ids) for group, _ in rows])
    kept_lens_B = torch.tensor([min(len(completion.token_ids), width) for _, completion in rows])
    starts_B = torch.full_like(prompt_lens_B, longest_prompt) if prompt_padding == "left" else prompt_lens_B
    input_ids_BS = torch.full((len(rows), length), pad_token_id, dtype=torch.long)
    attention_mask_BS = torch.zeros(len(rows), length, dtype=torch.bool)
    completion_ids_BT = torch.full((len(rows), width), pad_token_id, dtype=torch.long)
    for row, (group, completion) in enumerate(rows):
        ids = torch.tensor([*group.prompt_ids, *completion.token_ids[:width]], dtype=torch.long)
        first = int(starts_B[row] - prompt_lens_B[row])
        input_ids_BS[row, first : first + len(ids)] = ids
        attention_mask_BS[row, first : first + len(ids)] = True
        completion_ids_BT[row, : kept_lens_B[row]] = ids[prompt_lens_B[row] :]

    mask_BT = lengths_to_mask(kept_lens_B, width) & _sampled([completion for _, completion in rows], width)
    if mask_truncated:
        is_cut = [completion.finish_reason == "length" or len(completion.token_ids) > width for _, completion in rows]
        mask_BT[torch.tensor(is_cut)] = False
    has_reference = groups[0].ref_logprobs is not None
    reference = [row for group in groups if group.ref_logprobs is not None for row in group.ref_logprobs]
    batch = CollatedBatch(
        input_ids=input_ids_BS,
        attention_mask=attention_mask_BS,
        position_ids=(attention_mask_BS.long().cumsum(dim=1) - 1).clamp(min=0) * attention_mask_BS,
        completion_starts=starts_B,
        completion_ids=completion_ids_BT,
        completion_mask=mask_BT,
        rewards=torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float32),
        group_ids=torch.repeat_interleave(
            torch.arange(len(groups)), torch.tensor([len(group.completions) for group in groups])
        ),
        old_logprobs=_sampler_logprobs([completion for _, completion in rows], width),
        ref_logprobs=_padded(reference, width) if has_reference else None,
        policy_versions=torch.tensor([_oldest_version(group, completion) for group, completion in rows]),
        item_ids=[group.item_id for group, _ in rows],
    )
    stats = BatchStats(
        prompt_lens=prompt_lens_B.tolist(),
        completion_lens=kept_lens_B.tolist(),
        padded_sequence_len=length,
        padded_completion_len=width,
        finish_reasons=dict(Counter("clamped" if len(c.token_ids) > width else c.finish_reason for _, c in rows)),
        rewards=[float(reward) for group in groups for reward in group.rewards],
        datasets=dict(Counter(group.dataset for group, _ in rows)),
    )
    return batch, stats


def _check(groups: Sequence[Group]) -> None:
    if not groups:
        raise ValueError("make_batch needs at least one group")
    has_reference = [group.ref_logprobs is not None for group in groups]
    if any(has_reference) and not all(has_reference):
        raise ValueError(f"group {has_reference.index(False)} has no reference logprobs while others do")
    for index, group in enumerate(groups):
        size = len(group.completions)
        if size == 0 or len(group.prompt_ids) == 0:
            raise ValueError(f"group {index} has {size} completions of a prompt of {len(group.prompt_ids)} tokens")
        if len(group.rewards) != size:
            raise ValueError(f"group {index} has {size} completions and {len(group.rewards)} rewards")
        per_token: list[tuple[str, Sequence[float] | None, Completion]] = []
        for completion in group.completions:
            per_token.append(("sampler logprobs", completion.logprobs, completion))
            per_token.append(("token versions", completion.token_versions, completion))
            per_token.append(("`sampled` marks", completion.sampled, completion))
        if group.ref_logprobs is not None:
            if len(group.ref_logprobs) != size:
                raise ValueError(f"group {index} has {size} completions and {len(group.ref_logprobs)} reference rows")
            for row, completion in zip(group.ref_logprobs, group.completions, strict=True):
                per_token.append(("reference logprobs", row, completion))
        for name, values, completion in per_token:
            if values is not None and len(values) != len(completion.token_ids):
                raise ValueError(
                    f"group {index} has a completion of {len(completion.token_ids)} tokens with {len(values)} {name}"
                )


def _bucket(needed: int, buckets: Sequence[int] | None) -> int:
    """The smallest bucket that holds `needed`, else the largest; without buckets `needed` itself, at least 1."""
    if not buckets:
        return max(needed, 1)
    return min((bucket for bucket in buckets if bucket >= needed), default=max(buckets))


def _sampled(completions: Sequence[Completion], width: int) -> Tensor:
    """[B, width] bool, false on tokens that the policy did not sample according to `Completion.sampled`."""
    sampled_BT = torch.ones(len(completions), width, dtype=torch.bool)
    for row, completion in enumerate(completions):
        if completion.sampled is not None:
            kept = torch.tensor(list(completion.sampled[:width]), dtype=torch.bool)
            sampled_BT[row, : len(kept)] = kept
    return sampled_BT


def _oldest_version(group: Group, completion: Completion) -> int:
    return min(completion.token_versions or [group.policy_version])


def _sampler_logprobs(completions: Sequence[Completion], width: int) -> Tensor | None:
    if all(completion.logprobs is None for completion in completions):
        return None
    return _padded([() if completion.logprobs is None else completion.logprobs for completion in completions], width)


def _padded(rows: Sequence[Sequence[float]], width: int) -> Tensor:
    """[B, width] float32 of ragged rows, NaN where a row has no value, cut at width."""
    padded_BT = torch.full((len(rows), width), torch.nan)
    for index, row in enumerate(rows):
        kept = torch.as_tensor(list(row[:width]), dtype=torch.float32)
        padded_BT[index, : len(kept)] = kept
    return padded_BT
