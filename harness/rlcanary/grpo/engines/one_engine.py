"""Start one engine of a plan in this process, with its endpoint for weight sync."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcanary.contract.engine import Engine
from rlcanary.contract.sampling import Sampling
from rlcanary.errors import UserError
from rlcanary.grpo.engines.engine_pool import EnginesLost
from rlcanary.grpo.plan.plan import SamplerRole
from rlcanary.grpo.sync.sync import Endpoint, InProcessEndpoint
from rlcanary.system import processes

# Without them vLLM takes most of the memory and binds itself to cores that the trainer uses.
VLLM_CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@contextmanager
def start_engine(role: SamplerRole, sampling: Sampling, dtype: str, folder: Path) -> Iterator[tuple[Engine, Endpoint]]:
    """Start one engine of a role in this process, with the model in a folder, and its endpoint.

    Raises:
        UserError: vLLM is not installed, or refuses the options of the role.
        EnginesLost: vLLM's engine did not start.
    """
    if role.engine == "vllm":
        with _vllm(role, sampling, dtype, folder) as started:
            yield started
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlcanary.grpo.engines.transformers_policy import TransformersPolicy

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    engine = TransformersPolicy(model, tokenizer, eos_token_ids=sampling.eos_token_ids, copies=True, **role.options)
    yield engine, InProcessEndpoint(engine)


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
        try:
            llm = vllm.LLM(**engine_options(str(folder), processed_logprobs=sampling.logprobs != "raw", **options))
        except (TypeError, ValueError) as error:
            raise UserError(f"vLLM refuses roles.sampler.options {role.options}: {_in_a_line(error)}") from error
        except RuntimeError as error:
            raise EnginesLost(f"vLLM's engine did not start: {_in_a_line(error)}") from error
        policy = VllmPolicy(llm, eos_token_ids=sampling.eos_token_ids)
        yield policy, policy
    finally:
        # By id and at once: vLLM's own shutdown waits several seconds before it kills a busy engine.
        started = processes.children() - before
        # Without the tracker of its named memory, this process would start another, which knows none of the names.
        processes.end({each for each in started if not processes.is_kept(each.pid)})


def _in_a_line(error: Exception) -> str:
    return textwrap.shorten(str(error), 400, placeholder=" …")
