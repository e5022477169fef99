"""torchrl's model wrapper sampling from a transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.torchrl.base import TorchrlBase
from rlcanary.adapters.torchrl.data import completion_of, generate_kwargs
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.sampling import Sampling

if TYPE_CHECKING:
    from rlcanary.contract.batch import Completion


class Sampler(TorchrlBase):
    """Samples of a model."""

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        """Sample with the wrapper in the mode that rollouts use."""
        import torch
        from tensordict import TensorDict, lazy_stack

        model = getattr(engine, "model", engine)
        if not hasattr(model, "generation_config"):
            raise NotProvided("torchrl samples from a transformers model in this process")
        request = Sampling(**sampling).with_ends(())
        if request.seed is not None:
            raise NotProvided("the wrapper has no seed for its requests to a transformers model")
        if request.temperature == 0 and request.n > 1:
            raise NotProvided("greedy sampling gives one completion")
        wrapper = self._wrapped(model, generate=True, generate_kwargs=generate_kwargs(request))
        rows = lazy_stack([TensorDict({"tokens": {"prompt": torch.tensor(prompt)}}) for prompt in prompts])
        with quiet(), torch.no_grad():
            groups = wrapper(rows).reshape(len(prompts), -1).unbind(0)
        return [[completion_of(row, request) for row in group.unbind(0)] for group in groups]
