"""torchrl's weight sync by a folder that both sides know, with the engine in the place of vLLM's local one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.torchrl.base import TorchrlBase


class Syncing(TorchrlBase):
    """The weights that the sampler uses."""

    def sync_weights(self, state: Any, engine: Any) -> None:
        from tempfile import TemporaryDirectory

        from torchrl.weight_update.llm.vllm_double_buffer import VLLMDoubleBufferSyncScheme

        worker = SimpleNamespace(model_runner=SimpleNamespace(model=engine))
        vllm = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=worker), reset_prefix_cache=engine.reset_prefix_cache
        )
        with TemporaryDirectory() as folder, quiet():
            scheme = VLLMDoubleBufferSyncScheme(remote_addr=folder)
            sender = scheme.create_sender()
            sender.register_model(state.model)
            sender.update_weights()
            scheme.create_receiver(vllm).poll_and_apply()
        # As a collector counts the syncs that it is told of.
        engine.version += 1
