"""One update on several data-parallel ranks, in micro-batches."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rlcanary.adapters.trl import releases
from rlcanary.adapters.trl.base import TrlBase
from rlcanary.adapters.trl.trainer.ranks import Ranks
from rlcanary.adapters.trl.trainer.state import Rollout
from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.batch import CollatedBatch
    from rlcanary.contract.records.layouts import Layout

# What an update moves on in a trainer.
PROGRESS = ("state", "control", "_step", "_metrics", "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")


class TrlLayouts(TrlBase):
    """One update on several ranks, which are threads that share the model."""

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        """Run the loop on rank 0 and the same training steps on the others, whose gradients are averaged."""
        if layout != replace(layout, context_parallel=1, tensor_parallel=1, pipeline_parallel=1, expert_parallel=1):
            raise NotProvided("the trainer is data-parallel")
        if batch.ref_logprobs is not None and state.trainer.beta:
            raise NotProvided("the trainer scores with its reference model itself")
        if layout.data_parallel > 1:
            releases.require_threads()
        rollout, count = Rollout.of_batch(batch), layout.data_parallel
        size, rest = divmod(len(rollout.rewards), count * layout.micro_batches)
        if rest:
            raise NotProvided(f"{count} ranks and {layout.micro_batches} micro-batches have to have equally many rows")
        ranks, adding = Ranks(count), threading.Lock()
        losses: list[Any] = [0.0] * count

        def work(rank: int, own: Any) -> Any:
            part = rollout.part(rank, count)
            own.model, own.num_generations, own._buffered_inputs = state.trainer.model, part.group_size, None
            own.args.per_device_train_batch_size = size
            own.args.gradient_accumulation_steps = own.args.steps_per_generation = layout.micro_batches
            own.current_gradient_accumulation_steps = layout.micro_batches
            own.replayed = part.outputs(with_logprobs=own.use_vllm)
            own._last_loaded_step = own.state.global_step
            own._step = 0
            backward, step = own.accelerator.backward, own.training_step

            def averaged(loss: Any, **options: Any) -> None:
                with adding:
                    backward(loss / count, **options)

            def counted(*arguments: Any) -> Any:
                loss = step(*arguments)
                losses[rank] = losses[rank] + loss
                if own._step == layout.micro_batches:
                    ranks.all(None)  # No rank steps before the gradients of all are there.
                return loss

            own.accelerator.backward, own.training_step = averaged, counted
            batches = [part.inputs()] * layout.micro_batches
            if rank == 0:
                state.epoch_over(own, batches)
            else:
                for inputs in batches:
                    own.training_step(own.model_wrapped, inputs, None)
            return own

        with state.running() as trainer:
            before = len(trainer.state.log_history)
            arguments = copy.copy(trainer.args)
            with patch("transformers.trainer.nested_gather", lambda *_: sum(losses) / count):
                own = ranks.run(work, trainer)[0]
            for name in PROGRESS:
                setattr(trainer, name, getattr(own, name))
            trainer.args = arguments
        logged: dict[str, float] = state.logged_since(before)[-1]
        return logged
