"""How the tests start a vLLM engine."""

# The model runs in the engine's process, as it does on one GPU. vLLM's default on a CPU is another process of its own, whose
# imports cost as much as all else that such a test does.
IN_THE_ENGINE = {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
