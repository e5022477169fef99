"""A script that trains with TRL on vLLM's engine in the same process, with the audit, and writes findings as JSON.

After half of the updates weights no longer reach the engine.

vLLM packs its weights on a CPU, and TRL writes into weights that are not packed: here they are packed anew at each sync.
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from live_trl_ranks import trainer_of

from rlcanary import live
from rlcanary.tiny_models import tiny_qwen2, tiny_tokenizer

STEPS = 20


def pack_at_each_sync(llm: Any, is_lost: Callable[[], bool]) -> None:
    """Load the weights that TRL sends when it resets the prefix cache, which ends its sync; or lose them on the way."""
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    load, reset, sent = runner.model.load_weights, llm.reset_prefix_cache, {}

    def keep(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        sent.update((name, weight.detach().clone()) for name, weight in weights)

    def end_of_sync() -> Any:
        if not is_lost():
            runner.model.load_weights = load
            runner.reload_weights(weights_iterator=iter(sent.items()))
            runner.model.load_weights = keep
        return reset()

    runner.model.load_weights, llm.reset_prefix_cache = keep, end_of_sync


def main(folder: Path) -> None:
    torch.manual_seed(0)
    tiny_qwen2().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    trainer = trainer_of(
        str(folder / "model"),
        folder,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=64,
        max_steps=STEPS,
        learning_rate=1e-2,
    )
    pack_at_each_sync(trainer.vllm_generation.llm, lambda: trainer.state.global_step > STEPS // 2)
    callback = live.trl(trainer, every=1, on_finding="log")
    trainer.add_callback(callback)
    trainer.train()
    told = [(finding.since, str(finding)) for finding in callback.audit.findings]
    (folder / "told.json").write_text(json.dumps({"found": told, "audited": callback.audit.audited}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
