"""torchrl's model wrapper scoring tokens."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.batches import tokens_of_completions
from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.torchrl.base import TorchrlBase
from rlcanary.adapters.torchrl.data import ragged_rows
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch


class Scoring(TorchrlBase):
    """Logprobs, entropies and the mask of completions."""

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        if temperature != 1.0:
            raise NotProvided("torchrl scores tokens at temperature 1 only")
        return _distribution(logits).log_prob(token_ids)  # type: ignore[no-any-return]

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        return self._scored(model, batch, temperature, pad_model_input=True)

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        return self._scored(model, batch, temperature, pad_model_input=False)

    def entropy(self, logits: Tensor) -> Tensor:
        return _distribution(logits).entropy()  # type: ignore[no-any-return]

    def completion_mask(self, completion_ids: Tensor, eos_token_ids: Sequence[int], pad_token_id: int) -> Tensor:
        """Return the wrapper's mask over the output of a transformers model's `generate`: padding after the first EOS."""
        import torch
        from tensordict import TensorDict, lazy_stack

        is_eos = torch.isin(completion_ids, torch.tensor(list(eos_token_ids)))
        is_finished = (is_eos.cumsum(dim=1) - is_eos.long()) > 0
        generated = completion_ids.masked_fill(is_finished, pad_token_id)
        prompt = (completion_ids.new_tensor([5]) if pad_token_id != 5 else completion_ids.new_tensor([6])).long()

        def generate(input_ids: Tensor, **_: Any) -> dict[str, Tensor]:
            return {"sequences": torch.cat([input_ids, generated], dim=1)}

        model = SimpleNamespace(generate=generate)
        wrapper = self._wrapped(model, generate=True, return_log_probs=False, pad_output=True)
        wrapper.tokenizer.pad_token_id = pad_token_id
        rows = lazy_stack([TensorDict({"tokens": {"prompt": prompt}}) for _ in completion_ids])
        with quiet():
            scored = wrapper(rows)
        return scored["masks", "all_attention_mask"][:, 1:]  # type: ignore[no-any-return]

    def _scored(self, model: Any, batch: CollatedBatch, temperature: float, pad_model_input: bool) -> Tensor:
        """Return the policy's logprobs as the loss takes them; a temperature goes into torchrl's `generate_kwargs`."""
        import torch

        wrapper = self._wrapped(
            model, generate=False, generate_kwargs={"temperature": temperature}, pad_model_input=pad_model_input
        )
        with quiet():
            logprobs, _, _ = self._new_loss(wrapper)._get_cur_log_prob(ragged_rows(batch))
        # Rows end together, for torchrl pads them on the left.
        lengths = tokens_of_completions(batch).sum(dim=1).tolist()
        completions = [row[len(row) - length :] for row, length in zip(logprobs, lengths, strict=True)]
        width = batch.completion_ids.shape[1]
        return torch.stack(
            [torch.nn.functional.pad(row, (0, width - len(row)), value=torch.nan) for row in completions]
        )


def _distribution(logits: Tensor) -> Any:
    import torch
    from torchrl.modules.distributions import LLMMaskedCategorical

    return LLMMaskedCategorical(logits=logits, mask=torch.ones(logits.shape[:-1], dtype=torch.bool))
