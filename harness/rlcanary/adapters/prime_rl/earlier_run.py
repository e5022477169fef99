"""The training loop of prime-rl of May 2026 in this process: what it sets up in another way than that of August."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import has_part, part
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.adapters.prime_rl.rows import Row


def packed(rows: list[Row]) -> list[Any]:
    """Make the micro-batches of rows, as the packer and the loader do.

    Raises:
        NotProvided: the tree is older.
    """
    if not has_part("prime_rl.trainer.rl.loss:setup_loss_fns"):
        raise NotProvided("the training loop of this tree is another one")
    make = part("prime_rl.transport.types:TrainingSample")
    from prime_rl.trainer.batch import prepare_batch
    from prime_rl.trainer.rl.data import DataLoader

    samples = [
        make(
            prompt_ids=row.token_ids[: row.start],
            prompt_mask=row.mask[: row.start],
            completion_ids=row.token_ids[row.start :],
            completion_mask=row.mask[row.start :],
            completion_logprobs=row.logprobs[row.start :],
            completion_temperatures=[row.temperature] * (len(row.token_ids) - row.start),
            env_name="env",
            advantage=row.advantage,
        )
        for row in rows
    ]
    loader = DataLoader.__new__(DataLoader)
    (made,) = prepare_batch(samples, max(len(row.token_ids) for row in rows), 1, [0] * len(rows), 1)
    return [loader._micro_batch_to_tensor(each) for each in made]


def places(
    module: ModuleType,
    state: Any,
    micro_batches: list[Any],
    note: Callable[[Mapping[str, Any], Tensor], None],
    logged: dict[str, float],
) -> list[tuple[Any, str, Any]]:
    """Return what stands in for parts of the loop that have other names, or give something else, than in August.

    Args:
        module: of the loop.
        state: has the optimizer.
        micro_batches: those of the step.
        note: keeps the logprobs of the rows of a micro-batch.
        logged: takes the numbers that the loop logs.
    """
    import torch

    compute_loss, left = module.compute_loss, iter(micro_batches)

    def scored(trainer_logprobs: tuple[Tensor, ...], **given: Any) -> Any:
        micro_batch, logprobs = next(left), torch.cat(trainer_logprobs).unsqueeze(0)
        # The loop takes a row of a single token for a part of the one before it.
        starts = torch.nn.functional.pad(micro_batch["position_ids"][0] == 0, (0, 1), value=True).nonzero().flatten()
        note({**micro_batch, "sequence_lengths": starts.diff().tolist()}, logprobs)
        return compute_loss(trainer_logprobs=trainer_logprobs, **given)

    def log(metrics: Mapping[str, float], **_: Any) -> None:
        logged.update(metrics)

    def clipped(parameters: Any, max_norm: float, **_: Any) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    monitor = SimpleNamespace(log=log, history=[{"perf/peak_memory": 0.0}])
    runs = SimpleNamespace(used_idxs=[])
    return [
        (module, "compute_loss", scored),
        (module, "clip_grad_norm_", clipped),
        (module, "setup_monitor", lambda *_, **__: monitor),
        (module, "setup_multi_run_manager", lambda *_: runs),
        (module, "setup_ckpt_managers", lambda *_: (None, None)),
        (module, "setup_tokenizer", lambda _: None),
        (module, "setup_optimizer", lambda *_, **__: state.optimizer),
    ]
