"""How the tests start a vLLM engine, and find its process."""

from rlcanary.system.processes import command_line

# The model runs in the engine's process, as it does on one GPU. vLLM's default on a CPU is another process of its own, whose
# imports cost as much as all else that such a test does.
IN_THE_ENGINE = {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}


def is_engine_core(pid: int) -> bool:
    """Tell if a child of the process that made an engine is the engine's.

    vLLM names it so once it runs, but for about one in twenty engines on a busy machine: those keep the command that
    multiprocessing started them with.
    """
    return any(name in command_line(pid) for name in ("EngineCore", "multiprocessing.spawn"))
