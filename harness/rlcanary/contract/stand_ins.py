"""Models that stand in for the policy, for code whose loss or rollout takes a model and not its numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlcanary.contract.declining import NotProvided
from rlcanary.contract.sampling import Sampling

if TYPE_CHECKING:
    from rlcanary.contract.batch import Completion, PolicyBatch


class LogprobModel(torch.nn.Module):
    """A model that gives the tokens of a `PolicyBatch` their logprobs, for a loss that takes a model or calls `backward`.

    Its vocabulary has two ids: 0 stands on padding and on tokens that are not trained, 1 on those that are. The prompt is
    one token, the number of the row, by which it is known again however the code sorts, splits or pads the rows.

    Attributes:
        input_ids: [B, 1 + T] the prompt and the completion of each row.
    """

    def __init__(self, batch: PolicyBatch, logprobs: Tensor | None = None) -> None:
        """Take the batch, and [B, T] logprobs if others than those of the policy: `batch.ref_logprobs`, for one."""
        super().__init__()
        self._wanted = batch.logprobs
        self._mask = batch.mask
        self.weight = torch.nn.Parameter((batch.logprobs if logprobs is None else logprobs).detach().clone())
        self._gradient = torch.zeros_like(self.weight)
        self.weight.register_hook(self._add)
        prompt_B1 = torch.arange(len(batch.mask), device=batch.mask.device).unsqueeze(1)
        self.input_ids = torch.cat([prompt_B1, batch.mask.long()], dim=1)

    def _add(self, gradient: Tensor) -> None:
        self._gradient += gradient

    def forward(self, input_ids: Tensor, *_: Any, **__: Any) -> Any:
        """Score rows of `input_ids`, any of them, also cut or padded on the right -> an object with `logits` [B, S, 2].

        Raises:
            NotProvided: a logprob is NaN or above 0. No logits give it, and NaN logits spoil the gradient of a `log_softmax`
                also where the code leaves them out, as it should.
        """
        known = min(input_ids.shape[1], self.weight.shape[1])
        rows_B = input_ids[:, 0] if known else input_ids.new_zeros(len(input_ids))
        chosen_BT = self.weight[rows_B, :known]
        if not (chosen_BT <= 0).all():
            raise NotProvided("takes a model, whose logprobs are never NaN or above 0")
        others_BT = torch.log(-torch.expm1(chosen_BT.clamp(max=-1e-6)))
        is_one_BT = self.input_ids[rows_B, 1 : 1 + known] == 1
        logits_BTV = torch.stack(
            [chosen_BT.where(~is_one_BT, others_BT), chosen_BT.where(is_one_BT, others_BT)], dim=-1
        )
        padding = (0, 0, 0, input_ids.shape[1] - known)
        return SimpleNamespace(logits=torch.nn.functional.pad(logits_BTV, padding))

    def completions(self) -> list[list[int]]:
        """Return the ids of each completion, for code that is given lengths and no mask.

        Raises:
            NotProvided: a token within a completion is not trained.
        """
        lengths = self._mask.sum(dim=1).tolist()
        if any(not row[:length].all() for row, length in zip(self._mask, lengths, strict=True)):
            raise NotProvided("takes completions that are trained whole")
        return [[1] * length for length in lengths]

    def loss(self, value: Tensor | float) -> Tensor:
        """Return this loss as one that is differentiable in `batch.logprobs`.

        Args:
            value: the loss, or its number where the code has called `backward` itself, however often.
        """
        if isinstance(value, Tensor) and value.requires_grad:
            value.backward()
        number = torch.as_tensor(value).detach().to(self.weight)
        loss: Tensor = _WithGradient.apply(self._wanted, number, self._gradient)  # type: ignore[no-untyped-call]
        return loss


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return grad_outputs[0] * gradient, None, None


class EngineModel:
    """A model of transformers whose `generate` asks an engine, for a rollout that calls it.

    Its logits give the sampled tokens the sampler's logprobs, and the others equal shares of what is left.
    """

    device = torch.device("cpu")

    def __init__(self, engine: Any, **generation_config: Any) -> None:
        """Take an engine with a tokenizer, and what the model's own generation config says: `do_sample=True`, for one."""
        self._engine, self._config = engine, generation_config

    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        generation_config: Any = None,
        pad_token_id: int | None = None,
        return_dict_in_generate: bool = False,
        **options: Any,
    ) -> Any:
        """Continue the rows of [B, S] prompts, padded on the left -> [B × n, S + T] ids, or an object with `sequences`.

        The object has `logits` and `scores` too, [B × n, V] of each new token. Options that concern neither are those of
        `Sampling.of`.
        """
        prompts_BS = inputs if input_ids is None else input_ids
        assert prompts_BS is not None, "generate was given no prompts"
        given = {} if generation_config is None else generation_config.to_diff_dict()
        options = self._config | given | options
        for name in ("output_logits", "output_scores", "use_cache", "transformers_version", "return_dict_in_generate"):
            options.pop(name, None)
        pad = options.pop("pad_token_id", None) if pad_token_id is None else pad_token_id
        pad = self._engine.tokenizer.pad_token_id if pad is None else pad
        is_token_BS = torch.ones_like(prompts_BS).bool() if attention_mask is None else attention_mask.bool()
        prompts = [row[is_token].tolist() for row, is_token in zip(prompts_BS, is_token_BS, strict=True)]
        request = vars(Sampling.of(options))
        rows = [each for group in self._engine.generate(prompts, request) for each in group]
        if any(each.finish_reason == "abort" for each in rows):
            raise NotProvided("a model in this process is not interrupted")
        longest = max(len(each.token_ids) for each in rows)
        padded = [[*each.token_ids, *[pad] * (longest - len(each.token_ids))] for each in rows]
        prompts_BS = prompts_BS.repeat_interleave(len(rows) // len(prompts), dim=0)
        sequences = torch.cat([prompts_BS, torch.tensor(padded).long()], dim=1)
        if not return_dict_in_generate:
            return sequences
        logits = tuple(torch.stack([self._logits(each, position) for each in rows]) for position in range(longest))
        return SimpleNamespace(sequences=sequences, logits=logits, scores=logits)

    def _logits(self, completion: Completion, position: int) -> Tensor:
        if completion.sampled is not None:
            raise NotProvided("a model samples all of its tokens")
        size = len(self._engine.tokenizer)
        if position >= len(completion.token_ids):
            return torch.zeros(size)
        logprob = torch.tensor(math.nan if completion.logprobs is None else completion.logprobs[position])
        logits = (torch.log(-torch.expm1(logprob.clamp(max=-1e-6))) - math.log(size - 1)).repeat(size)
        logits[completion.token_ids[position]] = logprob
        return logits
