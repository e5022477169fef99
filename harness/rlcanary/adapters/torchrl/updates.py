"""torchrl's GRPO trainer: all updates on the rollouts of a batch, which pass through its replay buffer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import part, quiet
from rlcanary.adapters.torchrl.losses.objective import METRICS
from rlcanary.adapters.torchrl.training import Training
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.batch import Group


class Updates(Training):
    """The updates of an RL step."""

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        from tensordict import set_list_to_stack
        from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
        from torchrl.objectives.llm import MCAdvantage

        from rlcanary.reference import make_batch

        new_trainer = part("torchrl.trainers.algorithms.grpo:GRPOTrainer")
        sizes = {len(group.completions) for group in groups}
        rows = sum(len(group.completions) for group in groups)
        updates = self.trainer["mini_batches"]
        if len(sizes) > 1 or rows % updates:
            raise NotProvided("grpo_size and batch_size are one size for all")
        batch, _ = make_batch(groups, pad_token_id)
        logged: dict[str, float] = {}

        def keep(_: int, average_losses: Any) -> None:
            named = {**METRICS, "grad_norm": "grad_norm"}
            found = {ours: average_losses.get(theirs, None) for theirs, ours in named.items()}
            logged.update({name: float(value) for name, value in found.items() if value is not None})

        with quiet(), set_list_to_stack(True):
            loss = self._actor_loss(state, batch)
            buffer = ReplayBuffer(
                storage=LazyStackStorage(rows),
                sampler=SamplerWithoutReplacement(),
                transform=MCAdvantage(grpo_size=sizes.pop(), prompt_key="group", **self.advantage),
                batch_size=rows // updates,
            )
            trainer = new_trainer(
                collector=SimpleNamespace(),
                total_frames=rows,
                loss_module=loss,
                optimizer=state.optimizer,
                replay_buffer=buffer,
                num_epochs=self.trainer["num_epochs"],
                progress_bar=False,
                log_rewards=False,
            )
            part("torchrl.trainers:LRSchedulerHook")(state.scheduler, interval=self.trainer["interval"]).register(
                trainer
            )
            trainer.register_op("post_optim_complete_log", keep)
            trainer.optim_steps(self._dialogs(state, batch))
            trainer._post_steps_hook()
        return logged
