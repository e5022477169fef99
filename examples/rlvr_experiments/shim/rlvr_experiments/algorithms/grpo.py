"""Batches of rollouts: `rlcanary.reference.make_batch`, on groups."""

from dataclasses import dataclass
from typing import Any

from rlcanary.contract.batch import Completion, Group
from rlcanary.reference import make_batch as collate

SEQ_LEN_BUCKETS = [256, 384, 512, 640, 768, 896, 1024]
COMPLETION_LEN_BUCKETS = [128, 256, 384, 512]


@dataclass
class RolloutSample:
    """The completions of one prompt, padded on the right."""

    input_ids: Any
    completion_ids: Any
    logprobs: Any
    prompt_len: int
    finish_reasons: list
    completion_lens: list

    @classmethod
    def from_vllm(cls, response, pad_token_id):
        """Collate an answer of vLLM."""
        completions = [
            Completion(
                output.token_ids,
                [at[token].logprob for token, at in zip(output.token_ids, output.logprobs, strict=True)],
                output.finish_reason,
            )
            for output in response.outputs
        ]
        batch, stats = collate([Group(response.prompt_token_ids, completions, [0.0] * len(completions))], pad_token_id)
        return cls(
            batch.input_ids,
            batch.completion_ids,
            batch.old_logprobs,
            len(response.prompt_token_ids),
            [completion.finish_reason for completion in completions],
            stats.completion_lens,
        )


@dataclass
class TrainSample:
    """A rollout with its rewards and the reference model's logprobs."""

    rollout: RolloutSample
    rewards: list
    ref_logprobs: Any
    item_id: str
    trainer_version: int
    dataset: str = "unknown"


@dataclass
class Batch:
    """All rows of a batch."""

    input_ids: Any
    completion_ids: Any
    logprobs: Any
    rewards: Any
    mask: Any
    prompt_lens: Any
    ref_logprobs: Any


@dataclass
class BatchStats:
    """Lengths of a batch, and how often each finish reason came up."""

    seq_lens: list
    completion_lens: list
    padded_seq_len: int
    padded_completion_len: int
    finish_reasons: dict


def make_batch(samples, pad_token_id, seq_len_buckets=None, completion_len_buckets=None):
    """Collate samples -> the batch and its statistics."""
    batch, stats = collate(
        [_group(sample) for sample in samples],
        pad_token_id,
        seq_len_buckets or SEQ_LEN_BUCKETS,
        completion_len_buckets or COMPLETION_LEN_BUCKETS,
    )
    fields = (batch.input_ids, batch.completion_ids, batch.old_logprobs, batch.rewards, batch.completion_mask.float())
    return Batch(*fields, batch.completion_starts, batch.ref_logprobs), BatchStats(
        stats.seq_lens,
        stats.completion_lens,
        stats.padded_sequence_len,
        stats.padded_completion_len,
        stats.finish_reasons,
    )


def _group(sample):
    rollout = sample.rollout

    def of_each_row(values):
        return [row[:length].tolist() for row, length in zip(values, rollout.completion_lens, strict=True)]

    columns = of_each_row(rollout.completion_ids), of_each_row(rollout.logprobs), rollout.finish_reasons
    return Group(
        prompt_ids=rollout.input_ids[0, : rollout.prompt_len].tolist(),
        completions=[Completion(*row) for row in zip(*columns, strict=True)],
        rewards=sample.rewards,
        ref_logprobs=None if sample.ref_logprobs is None else of_each_row(sample.ref_logprobs),
        item_id=sample.item_id,
        policy_version=sample.trainer_version,
        dataset=sample.dataset,
    )
