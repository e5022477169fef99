"""The start of a run of verl, and its checkpoints: the FSDP engine's own parts, without FSDP."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.verl.rollouts import Rollouts
from rlcanary.adapters.verl.runs import silent
from rlcanary.adapters.verl.workers.engine import new_engine, on_ranks
from rlcanary.adapters.verl.workers.run_config import composed
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.state import TrainState

if TYPE_CHECKING:
    from rlcanary.contract.records.building import RunSettings


class Building(Rollouts):
    """The start of a run, and its checkpoints."""

    def build(self, settings: RunSettings, model: Any) -> Any:
        """Build module, adapters, optimizer and schedule as the engine does."""
        if settings.rate_shape == "linear" or settings.frozen:
            raise NotProvided("verl has no linear fall of the rate and freezes no parts by name")
        engine = self._engine(settings, model, forward_only=False)
        module = engine._build_module()
        if settings.gradient_checkpointing:
            # As in each of the engine's forward passes.
            module.config.use_cache = False
        with quiet(), silent():
            if settings.lora is not None:
                module = engine._build_lora_module(module)
            optimizer = engine._build_optimizer(module)
            scheduler = engine._build_lr_scheduler(optimizer)
        # With adapters the reference is the actor without them.
        has_reference = self.conventions.kl_coef and settings.lora is None
        ref_model = self._engine(settings, model, forward_only=True)._build_module() if has_reference else None
        return TrainState(module, optimizer, scheduler, ref_model)

    def save_checkpoint(self, state: Any, folder: Path) -> None:
        from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

        with silent():
            trainer = self._saving(state, folder)
            latest = find_latest_ckpt_path(str(folder))
            trainer.global_steps = 1 + (int(latest.rpartition("_")[2]) if latest else 0)
            trainer._save_checkpoint()

    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        with silent():
            self._saving(state, folder)._load_checkpoint()
        return state

    def _saving(self, state: Any, folder: Path) -> Any:
        """Make a trainer whose worker has this state."""

        def call(name: str, *args: Any, **options: Any) -> None:
            on_ranks(1, lambda _, __: self._call(state, name, *args, **options))

        workers = SimpleNamespace(
            save_checkpoint=lambda *args, **options: call("save_checkpoint", *args, **options),
            load_checkpoint=lambda *args, **options: call("load_checkpoint", *args, **options),
        )
        return self._loaded(1, 1, {"default_local_dir": str(folder)}, {"actor_rollout_wg": workers})

    def _call(self, state: Any, name: str, *args: Any, **options: Any) -> None:
        """Call a method of the engine that writes or reads its checkpoints."""
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

        with connected(), quiet():
            engine = new_engine(self._actor_config, None, state.model, state.optimizer, state.scheduler)
            engine.checkpoint_manager = FSDPCheckpointManager(
                model=state.model,
                optimizer=state.optimizer,
                lr_scheduler=state.scheduler,
                checkpoint_config=self._actor_config.checkpoint,
            )
            getattr(engine, name)(*args, **options)

    def _engine(self, settings: RunSettings, model: Any, forward_only: bool) -> Any:
        """Make the engine of the actor or of the reference, for which a copy of the model stands in for the files."""
        from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig

        config = composed().actor_rollout_ref
        engine = new_engine(self._actor_config, None)
        part = config.ref if forward_only else config.actor
        engine.engine_config = FSDPEngineConfig(model_dtype=part.fsdp_config.model_dtype, forward_only=forward_only)
        engine.optimizer_config = FSDPOptimizerConfig(
            lr=settings.learning_rate,
            lr_warmup_steps=settings.warmup_updates,
            total_training_steps=settings.total_updates,
            weight_decay=settings.weight_decay,
            betas=settings.betas,
            min_lr_ratio=settings.final_share,
            lr_scheduler_type=settings.rate_shape,
            override_optimizer_config={"eps": settings.eps},
        )
        engine.rank, engine.device_mesh, engine.use_remove_padding = 0, None, config.model.use_remove_padding
        engine.model_config = SimpleNamespace(
            **{name: config.model[name] for name in ("use_liger", "fused_kernel_options", "use_fused_kernels")},
            **{name: config.model[name] for name in ("trust_remote_code", "exclude_modules", "lora_adapter_path")},
            model_type="language_model",
            hf_config=model.config,
            local_path=None,
            enable_gradient_checkpointing=settings.gradient_checkpointing,
            lora_rank=settings.lora.rank if settings.lora else 0,
            lora_alpha=settings.lora.alpha if settings.lora else 0,
            target_modules=list(settings.lora.targets) if settings.lora else None,
            target_parameters=None,
        )
        engine._build_module = lambda: self._built_module(engine, model)
        return engine

    def _built_module(self, engine: Any, model: Any) -> Any:
        from verl.utils import model as verl_model
        from verl.workers.engine.fsdp import transformer_impl

        class Loaded:
            @staticmethod
            def from_pretrained(torch_dtype: Any, **_: Any) -> Any:
                return copy.deepcopy(model).to(torch_dtype)

        with contextlib.ExitStack() as stack:
            for replaced in (
                mock.patch.object(verl_model, "get_hf_auto_model_class", return_value=Loaded),
                mock.patch.object(
                    transformer_impl, "get_init_weight_context_manager", return_value=contextlib.nullcontext
                ),
                # Patches for kernels of a GPU.
                mock.patch.object(transformer_impl, "apply_monkey_patch"),
                *(quiet(), silent()),
            ):
                stack.enter_context(replaced)
            return type(engine)._build_module(engine)


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Give verl the one rank of a default process group."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()
