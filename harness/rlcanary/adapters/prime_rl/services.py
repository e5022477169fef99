"""The packages that prime-rl imports and the checks do not call."""

# Sandboxes, loggers, transports and kernels: the checks call none of them.
SERVICES = (
    *("tenacity", "prime_sandboxes", "prime_tunnel", "prime_evals", "prime_cli", "prime_runs"),
    *("wandb", "wandb_gql", "wandb_workspaces", "setproctitle", "prometheus_client", "modelexpress", "nixl", "zmq"),
    *("quack", "flash_attn", "ring_flash_attn", "torchao", "torchtitan", "dion", "deep_ep", "grouped_gemm", "fla"),
)
