"""Start one engine of a plan in this process, with its endpoint for weight sync."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlcanary.contract.engine import Engine
from rlcanary.contract.sampling import Sampling
from rlcanary.errors import UserError
from rlcanary.grpo.plan.plan import SamplerRole
from rlcanary.grpo.sync.sync import Endpoint, Expected, InProcessEndpoint
from rlcanary.grpo.sync.transports import Transport
from rlcanary.system import processes

# Without them vLLM takes most of the memory and binds itself to cores that the trainer uses.
VLLM_CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@contextmanager
def start_engine(role: SamplerRole, sampling: Sampling, dtype: str, folder: Path) -> Iterator[tuple[Engine, Endpoint]]:
    """Start one engine of a role in this process, with the model in a folder, and its endpoint."""
    if role.engine == "vllm":
        with _vllm(role, sampling, dtype, folder) as started:
            yield started
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlcanary.grpo.engines.transformers_policy import TransformersPolicy

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    engine = TransformersPolicy(model, tokenizer, eos_token_ids=sampling.ends, copies=True)
    yield engine, InProcessEndpoint(engine)


class VllmEndpoint(InProcessEndpoint):
    """The endpoint of a `VllmPolicy`: weights go through a request to its workers."""

    def expected(self) -> Mapping[str, Expected]:
        from rlcanary.grpo.engines.vllm_worker import checkpoint_shapes

        dtype = str(self.engine.llm.llm_engine.model_config.dtype).removeprefix("torch.")
        return {name: Expected(shape, dtype) for name, shape in checkpoint_shapes(self.engine.llm).items()}

    def receive(self, transport: Transport, parcel: Any) -> dict[str, str]:
        from rlcanary.grpo.engines.vllm_worker import receive
        from rlcanary.grpo.sync.transports import pack

        # The workers open bytes and files themselves; parcels that only this process can open go to them as bytes.
        if not isinstance(parcel, str):
            parcel = [pack(name, weight) for name, weight in transport.deliver(parcel)]
        return receive(self.engine.llm, parcel)


@contextmanager
def _vllm(role: SamplerRole, sampling: Sampling, dtype: str, folder: Path) -> Iterator[tuple[Engine, Endpoint]]:
    try:
        import vllm
    except ImportError as error:
        raise UserError(f"roles.sampler.engine is vllm, which is not installed ({error})") from error
    from rlcanary.grpo.engines.vllm_policy import VllmPolicy, engine_options

    for name, value in VLLM_CPU_DEFAULTS.items():
        os.environ.setdefault(name, value)
    options = {"dtype": dtype, "seed": sampling.seed, "disable_log_stats": True, **role.options}
    before = processes.children()
    try:
        llm = vllm.LLM(**engine_options(str(folder), processed_logprobs=sampling.logprobs != "raw", **options))
        policy = VllmPolicy(llm)
        yield policy, VllmEndpoint(policy)
    finally:
        # By id and at once: vLLM's own shutdown waits several seconds before it kills a busy engine.
        processes.end(processes.children() - before)
