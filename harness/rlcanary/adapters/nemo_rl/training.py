"""NeMo RL's GRPO step: its message logs, its estimator and its policy worker on one rollout batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcanary.adapters.batches import prompts_of, tokens_of_completions
from rlcanary.adapters.frameworks import has_part, part
from rlcanary.adapters.nemo_rl.objective import Objective
from rlcanary.adapters.nemo_rl.worker import importing, new_worker, on_cpu, workers
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import CollatedBatch
from rlcanary.contract.state import TrainState

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import Completion, Group
    from rlcanary.contract.records.lengths import Lengths

# What the trainer takes the mean of over micro-batches; it adds up the rest.
MEANS = ("lr", "global_valid_seqs", "global_valid_toks")
# Marks the tokens of messages that are trained.
MARK = "nemo_rl.algorithms.grpo:add_grpo_token_loss_masks_and_generation_logprobs"


class Training(Objective):
    """Scores and updates of a model."""

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        import torch

        flat, module = flat_of(batch), workers()
        rows = len(flat["input_ids"])
        with on_cpu():
            worker = new_worker(TrainState(model, None, None), rows, temperature, None)
            parameters = worker.sampling_params
            iterator, _ = module.get_microbatch_iterator(flat, worker.cfg, rows, None, None)
            scores = module.LogprobsPostProcessor(worker.cfg, None, None, None, 1, sampling_params=parameters)
            (one,) = iterator
            logprobs_BS, *_ = module.forward_with_post_processing_fn(model, scores, one, sampling_params=parameters)
        return of_completions(logprobs_BS, batch).masked_fill(~tokens_of_completions(batch), torch.nan)

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        import torch

        with importing():
            part(MARK)
        if any(group.ref_logprobs is not None for group in groups):
            raise NotProvided("the worker computes the reference's logprobs itself")
        pairs = [(group, index) for group in groups for index in range(len(group.completions))]
        prompts = [torch.tensor(group.prompt_ids) for group, _ in pairs]
        given = [group.completions[index] for group, index in pairs]
        if any(each.logprobs is None for each in given):
            raise NotProvided("the engine gives the logprobs of all that it samples")
        data = flat_data([_messages(*each) for each in zip(prompts, map(_tokens, given), strict=True)], pad_token_id)
        starts_B = torch.tensor([len(prompt) for prompt in prompts])
        width = max(len(each.token_ids) for each in given)
        # The mask of the model has no padding in it: that stands behind the tokens, which do not see it.
        places_S = torch.arange(data["input_ids"].shape[1])
        return CollatedBatch(
            input_ids=data["input_ids"],
            attention_mask=places_S < data["input_lengths"].unsqueeze(1),
            position_ids=places_S.expand_as(data["input_ids"]),
            completion_starts=starts_B,
            completion_ids=from_starts(data["input_ids"], starts_B, width, pad_token_id),
            completion_mask=from_starts(data["token_mask"], starts_B, width, 0).bool(),
            rewards=torch.tensor([float(group.rewards[index]) for group, index in pairs]),
            group_ids=torch.tensor([number for number, group in enumerate(groups) for _ in group.completions]),
            old_logprobs=from_starts(data["generation_logprobs"], starts_B, width, 0),
            item_ids=[group.item_id for group, _ in pairs],
        )

    def shape_rewards(self, rewards: Tensor, lengths: Lengths) -> Tensor:
        import torch
        from nemo_rl.algorithms.reward_functions import RewardShapingConfig, apply_reward_shaping
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        config = RewardShapingConfig(
            enabled=self.conventions.overlong_buffer is not None,
            overlong_buffer_length=self.conventions.overlong_buffer,
            overlong_buffer_penalty=self.conventions.overlong_penalty,
            max_response_length=lengths.max_new_tokens,
        )
        # Older trees read the lengths of the messages.
        logs = [[{"role": "assistant", "token_ids": torch.zeros(length)}] for length in lengths.completions.tolist()]
        batch = BatchedDataDict(
            {"total_reward": rewards, "response_token_lengths": lengths.completions, "message_log": logs}
        )
        return apply_reward_shaping(batch, config)["total_reward"]  # type: ignore[no-any-return]

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        return self._trained(state, batch, 1)

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        from rlcanary.reference import make_batch

        return self._trained(state, make_batch(groups, pad_token_id)[0], self.conventions.mini_batches)

    def _trained(self, state: Any, batch: CollatedBatch, mini_batches: int) -> dict[str, float]:
        import torch
        from nemo_rl.algorithms.loss import ClippedPGLossFn

        data = flat_of(batch)
        rows = len(data["input_ids"])
        if rows % mini_batches:
            raise NotProvided("updates have one number of rows")
        conventions = self.conventions
        with on_cpu():
            worker = new_worker(state, rows // mini_batches, conventions.temperature, conventions.max_grad_norm)
            data["prev_logprobs"] = worker.get_logprobs(data=data, micro_batch_size=rows)["logprobs"]
            if batch.ref_logprobs is not None:
                data["reference_policy_logprobs"] = _placed(batch.ref_logprobs, data, batch)
            elif state.ref_model is not None:
                scored = worker.get_reference_policy_logprobs(data=data, micro_batch_size=rows)
                data["reference_policy_logprobs"] = scored["reference_logprobs"]
            elif conventions.kl_coef:
                raise NotProvided("reference_policy_kl_penalty needs a reference")
            mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
            data["advantages"] = self.estimated(batch.rewards, batch.group_ids, mask)
            with torch.enable_grad():
                results = worker.train(data, ClippedPGLossFn(self.loss_config))
        logged = {name: _reduced(name, values) for name, values in results["all_mb_metrics"].items()}
        return {
            **self.renamed(logged, batch.old_logprobs),
            "loss": float(results["global_loss"].sum()),
            "grad_norm": float(results["grad_norm"]),
            "lr": logged["lr"],
        }


def _reduced(name: str, values: list[float]) -> float:
    """Reduce a metric of micro-batches as the trainer does: the worker has divided most by the number of updates."""
    if name.endswith("_min"):
        return min(values)
    if name.endswith("_max"):
        return max(values)
    return sum(values) / len(values) if name in MEANS else sum(values)


def flat_of(batch: CollatedBatch) -> Any:
    """Make the training data of a batch, whose rows begin with their prompts and are padded on the right."""
    kept_BT = tokens_of_completions(batch)
    logs = []
    for row, prompt in enumerate(prompts_of(batch)):
        kept = kept_BT[row]
        logprobs = None if batch.old_logprobs is None else batch.old_logprobs[row][kept]
        logs.append(_messages(prompt, (batch.completion_ids[row][kept], batch.completion_mask[row][kept], logprobs)))
    return flat_data(logs, 0)


def flat_data(logs: list[list[dict[str, Any]]], pad_token_id: int) -> Any:
    """Make the training data of message logs, as the trainer does."""
    import torch

    with importing():
        mark = part(MARK) if has_part(MARK) else _marked
        from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    class OnCpu(BatchedDataDict):  # type: ignore[misc]
        def to(self, device: Any) -> Any:
            return self

    mark(logs)
    flat, lengths = batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": pad_token_id})
    return OnCpu(
        {
            "input_ids": flat["token_ids"],
            "input_lengths": lengths,
            "generation_logprobs": flat["generation_logprobs"],
            "token_mask": flat["token_loss_mask"],
            "sample_mask": torch.ones(len(lengths)),
        }
    )


def _marked(logs: list[list[dict[str, Any]]]) -> None:
    """Mark the tokens that are trained, which older trees do within the loop of the trainer."""
    import torch

    for message in (message for log in logs for message in log):
        is_trained = message["role"] == "assistant"
        message["token_loss_mask"] = torch.full_like(message["token_ids"], int(is_trained))
        message.setdefault("generation_logprobs", torch.zeros(len(message["token_ids"])))


def _tokens(completion: Completion) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    sampled = [True] * len(completion.token_ids) if completion.sampled is None else completion.sampled
    return (
        torch.tensor(completion.token_ids, dtype=torch.long),
        torch.tensor(sampled, dtype=torch.bool),
        torch.tensor(completion.logprobs),
    )


def _messages(prompt: Tensor, completion: tuple[Tensor, Tensor, Tensor | None]) -> list[dict[str, Any]]:
    """Make the message log of a row: its prompt, and a message for each run of tokens of the policy or of a tool."""
    ids, trained, logprobs = completion
    messages: list[dict[str, Any]] = [{"role": "user", "content": "", "token_ids": prompt}]
    start = 0
    while start < len(ids):
        end = start + 1
        while end < len(ids) and trained[end] == trained[start]:
            end += 1
        message = {"role": "assistant" if trained[start] else "tool", "content": "", "token_ids": ids[start:end]}
        if trained[start]:
            message["generation_logprobs"] = ids[start:end].float() * 0 if logprobs is None else logprobs[start:end]
        messages.append(message)
        start = end
    return messages


def of_completions(values_BS: Tensor, batch: CollatedBatch) -> Tensor:
    """Return the values of the completions' tokens [B, T] of rows that begin with their prompts."""
    import torch

    starts_B = torch.tensor([len(prompt) for prompt in prompts_of(batch)])
    return from_starts(values_BS, starts_B, batch.completion_mask.shape[1], torch.nan)


def from_starts(values_BS: Tensor, starts_B: Tensor, width: int, filler: float) -> Tensor:
    """Return `width` values of each row from its start on; beyond the end of the rows there is the filler."""
    import torch

    places_BT = starts_B.unsqueeze(1) + torch.arange(width)
    return torch.nn.functional.pad(values_BS, (0, width), value=filler).gather(1, places_BT)


def _placed(values_BT: Tensor, data: Any, batch: CollatedBatch) -> Tensor:
    """Put values of the completions' tokens at their places in rows that begin with their prompts."""
    import torch

    placed = torch.zeros(data["input_ids"].shape)
    for row, (prompt, kept) in enumerate(zip(prompts_of(batch), tokens_of_completions(batch), strict=True)):
        chosen = values_BT[row][kept]
        placed[row, len(prompt) : len(prompt) + len(chosen)] = chosen
    return placed
