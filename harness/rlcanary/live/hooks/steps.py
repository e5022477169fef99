"""Updates of a loop that is not ours: each ends with a step of the optimizer, which torch announces."""

from __future__ import annotations

from typing import Any

from rlcanary.live.audit import Audit
from rlcanary.live.update import Update


class Steps:
    """The updates of an optimizer, from the first micro-batch that is watched to the step.

    Attributes:
        audit: of the run.
    """

    def __init__(self, audit: Audit, optimizer: Any, model: Any, scaler: Any = None) -> None:
        """Follow an optimizer from its next step on.

        Args:
            audit: of the run.
            optimizer: a `torch.optim.Optimizer`.
            model: the policy.
            scaler: the `GradScaler` of the losses, where there is one.
        """
        self.audit = audit
        self._optimizer, self._model, self._scaler = optimizer, model, scaler
        self._update: Update | None = None
        optimizer.register_step_post_hook(lambda *_: self._end())

    def update(self) -> Update:
        """Return the update that the next micro-batch belongs to."""
        if self._update is not None and self._update.has_gradient and not self._has_gradient():
            # What went before was thrown away, as trainers do with gradients that are not finite. Of a sharded model it
            # may also wait elsewhere for the last micro-batch: nobody can tell, so that the update is not judged.
            self._update.drop()
            if not self._is_sharded():
                self._update = None
        if self._update is None:
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            self._update = self.audit.update(loss_scale=scale, model=self._model, optimizer=self._optimizer)
            self._update.begin()
        return self._update

    def _has_gradient(self) -> bool:
        groups = self._optimizer.param_groups
        return any(parameter.grad is not None for group in groups for parameter in group["params"])

    def _is_sharded(self) -> bool:
        return any(hasattr(each, "to_local") for each in self._model.parameters())

    def _end(self) -> None:
        update, self._update = self._update, None
        if update is not None:
            update.end()
