"""Fixtures that start something large and always end it: Ray clusters, vLLM engines, GPU memory; and tiny models."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_rlcanary.stash import BELONGINGS
from rlcanary.cleanup.belongings import Belongings, empty_gpu_caches
from rlcanary.system import processes

# Settings that vLLM's CPU engine needs on a small machine; on a GPU it reads none of them.
VLLM_CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
HEADROOM = 2


def cluster_scope(fixture_name: str, config: pytest.Config) -> Any:  # noqa: ARG001 - pytest gives both by name
    """Read the scope of `ray_cluster` from the ini file."""
    return config.getini("rlcanary_ray_scope")


def check_scope(config: pytest.Config) -> None:
    """Refuse another scope when the session begins: pytest does not show what goes wrong while it asks for a scope."""
    scope = config.getini("rlcanary_ray_scope")
    if scope not in ("module", "session"):
        raise pytest.UsageError(f"rlcanary_ray_scope must be module or session, got {scope!r}")


@pytest.fixture(scope="session")
def ray_options() -> dict[str, Any]:
    """Arguments of `ray.init` for the clusters of `ray_session` and `ray_cluster`. Override it in a conftest."""
    return {"num_cpus": max(HEADROOM, os.cpu_count() or 1), "include_dashboard": False}


@pytest.fixture
def ray_session(request: pytest.FixtureRequest, ray_options: dict[str, Any]) -> Iterator[Any]:
    """A Ray cluster of the test's own, with a private namespace and folder; yields the module `ray`.

    With `--ray-address` the test is connected to that cluster instead, in a private namespace.
    """
    with cluster(request.config, ray_options) as ray:
        yield ray


@pytest.fixture(scope=cluster_scope, name="ray_cluster")
def ray_cluster_fixture(request: pytest.FixtureRequest, ray_options: dict[str, Any]) -> Iterator[Any]:
    """A Ray cluster that the tests of a module share (of the session with `rlcanary_ray_scope = session`)."""
    with cluster(request.config, ray_options) as ray:
        yield ray


@contextmanager
def cluster(config: pytest.Config, options: Mapping[str, Any]) -> Iterator[Any]:
    """Connect to a cluster started for this fixture, or to the one of `--ray-address`, and disconnect."""
    ray = pytest.importorskip("ray")
    belongings = config.stash[BELONGINGS]
    if ray.is_initialized():
        if belongings.ray_is_shared:
            pytest.fail("a cluster of another fixture is running in this process; a process can have only one")
        ray.shutdown()  # left by an earlier test, which no fixture owns
    namespace = f"rlcanary-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}-{os.urandom(4).hex()}"
    if address := config.getoption("ray_address"):
        ray.init(address=address, namespace=namespace)
    else:
        from rlcanary.cleanup.ray_start import start_ray

        start_ray(lambda: ray.init(address="local", namespace=namespace, **options))
    try:
        yield ray
    finally:
        if address:
            belongings.leave_ray()
        ray.shutdown()


@pytest.fixture
def clean_gpu() -> Iterator[None]:
    """Gives the test GPUs without garbage: collects and empties the caches before it and after it."""
    gc.collect()
    empty_gpu_caches()
    yield
    gc.collect()
    empty_gpu_caches()


@pytest.fixture(scope="module")
def vllm_engine_options(tiny_model_folder: Path) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for `vllm_engine`: a tiny Qwen2 of random weights. Override it in a module or a conftest."""
    return {
        "model": str(tiny_model_folder),
        "max_model_len": 256,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "dtype": "float32",
        "seed": 0,
    }


@pytest.fixture(scope="module")
def vllm_engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A `vllm.LLM` that the tests of a module share; its processes are gone when the module ends."""
    vllm = pytest.importorskip("vllm")
    options: dict[str, Any] = request.getfixturevalue("vllm_engine_options")
    with environment_defaults(VLLM_CPU_ENVIRONMENT):
        before = Belongings()
        try:
            yield vllm.LLM(**options)
        finally:
            # By id and at once: vLLM's own shutdown waits several seconds before it kills a busy engine.
            processes.end(before.children_since_start())
            if "vllm.distributed" in sys.modules:
                sys.modules["vllm.distributed"].cleanup_dist_env_and_memory()
            gc.collect()
            empty_gpu_caches()


@contextmanager
def environment_defaults(variables: Mapping[str, str]) -> Iterator[None]:
    """Give variables that are not set these values while entered."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen2 of random weights and a byte-level tokenizer with a chat template, for loading by path."""
    pytest.importorskip("transformers")
    from rlcanary.tiny_models import tiny_chat_tokenizer, tiny_qwen2

    folder = tmp_path_factory.mktemp("tiny-qwen2")
    tokenizer = tiny_chat_tokenizer()
    tiny_qwen2(vocabulary=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(name="tiny_llama")
def tiny_llama_fixture() -> Any:
    """A tiny Llama-like model of random weights (see rlcanary.tiny_models)."""
    pytest.importorskip("transformers")
    from rlcanary.tiny_models import tiny_llama

    return tiny_llama()


@pytest.fixture(name="tiny_qwen2")
def tiny_qwen2_fixture() -> Any:
    """A tiny Qwen2-like model of random weights (see rlcanary.tiny_models)."""
    pytest.importorskip("transformers")
    from rlcanary.tiny_models import tiny_qwen2

    return tiny_qwen2()


@pytest.fixture(name="tiny_gpt2")
def tiny_gpt2_fixture() -> Any:
    """A tiny GPT-2-like model of random weights (see rlcanary.tiny_models)."""
    pytest.importorskip("transformers")
    from rlcanary.tiny_models import tiny_gpt2

    return tiny_gpt2()


@pytest.fixture(scope="session")
def tiny_chat_tokenizer() -> Any:
    """A byte-level tokenizer with a chat template, whose end-of-sequence id the tiny models can sample."""
    pytest.importorskip("transformers")
    from rlcanary import tiny_models

    return tiny_models.tiny_chat_tokenizer()
