"""slime in one process on the CPU: its parser, its rollout manager, and its Megatron actor on a model of torch."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from rlcanary.adapters.frameworks import has_part, part, quiet, takes, usable
from rlcanary.adapters.stubs import absent
from rlcanary.contract.adapter import NotProvided

INSTALL = "put a checkout of slime and an unpacked wheel of megatron-core on PYTHONPATH"
# Servers, loggers and the launcher of Megatron, none of which the code under test calls.
ABSENT = ("sglang", "sglang_router", "wandb", "megatron.training", "torch_memory_saver", "megatron.bridge")

# Names by which older trees add the options of servers to the parser.
SERVERS = {
    "RouterArgs": SimpleNamespace(add_cli_args=lambda *_, **__: None),
    "add_sglang_arguments": lambda parser: parser,
}

MEGATRON = {
    "micro_batch_size": 1,
    "seq_length": None,
    "decoder_seq_length": None,
    "calculate_per_token_loss": False,
    "sequence_parallel": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "use_distributed_optimizer": False,
    "manual_gc": False,
}

SGLANG = {"sglang_speculative_algorithm": None, "sglang_router_policy": None}


def imported() -> None:
    """Import slime, and start a process group of this process alone with Megatron's groups in it.

    Raises:
        UserError: slime or Megatron's core is not installed or cannot be imported.
    """
    with (
        usable("megatron", INSTALL, "Megatron-core 0.16"),
        usable("slime", INSTALL, "slime of February to August 2026"),
        absent(*ABSENT),
        quiet(),
        on_cpu(),
    ):
        import slime.backends.megatron_utils.actor
        import slime.ray.rollout
        import slime.rollout.data_source
        import slime.rollout.sglang_rollout
        import slime.utils.arguments  # noqa: F401
        import torch
        from megatron.core import mpu

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        if not mpu.model_parallel_is_initialized():
            mpu.initialize_model_parallel()


def args_of(settings: Mapping[str, Any]) -> argparse.Namespace:
    """Parse slime's own options with their defaults, and set these.

    Raises:
        AttributeError: slime has no such option.
        NotProvided: an option of this tree has no such value.
    """
    from slime.utils import arguments

    servers = {name: stand_in for name, stand_in in SERVERS.items() if hasattr(arguments, name)}
    with patch.dict(vars(arguments), servers):
        parser = arguments.get_slime_extra_args_provider()(argparse.ArgumentParser())
    args = parser.parse_args(["--rollout-batch-size", "1"])
    choices = {action.dest: action.choices for action in parser._actions}
    for name, value in settings.items():
        if not hasattr(args, name):
            raise AttributeError(f"slime has no option {name}")
        if value not in (choices.get(name) or [value]):
            raise NotProvided(f"{name} of this tree is no {value}")
        setattr(args, name, value)
    # As slime_validate_args does.
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    # Options of Megatron and SGLang, with their defaults, which slime reads.
    for name, value in {**MEGATRON, **SGLANG}.items():
        if not hasattr(args, name):
            setattr(args, name, value)
    args.use_critic = args.advantage_estimator == "ppo"  # as slime_validate_args does
    return args


@contextmanager
def on_cpu(**mpu_sizes: int) -> Iterator[None]:
    """Run code that asks for the current GPU on the CPU, as a rank of these groups, and without messages.

    Args:
        mpu_sizes: results of functions of Megatron's parallel state, such as `get_context_parallel_rank`.
    """
    import contextlib

    import torch

    cpu = torch.device("cpu")
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "current_device", lambda: cpu))
        stack.enter_context(patch.object(torch.Tensor, "cuda", lambda tensor: tensor))
        import sys

        accelerator = sys.modules.get("slime.utils.accelerator")
        if accelerator is not None:
            stack.enter_context(patch.object(accelerator, "current_device", lambda: cpu))
            stack.enter_context(patch.object(accelerator, "device", lambda *_: cpu))
        if mpu_sizes:
            from megatron.core import mpu

            for name, value in mpu_sizes.items():
                stack.enter_context(patch.object(mpu, name, lambda *_, value=value, **__: value))
        stack.enter_context(quiet())
        yield


def rollout_metrics() -> ModuleType:
    """Import the module with the metrics of rollouts, which was the rollout manager's before August 2026."""
    place = "slime.observability.rollout_metrics"
    return importlib.import_module(place if has_part(f"{place}:log_eval_rollout_data") else "slime.ray.rollout")


def manager(args: argparse.Namespace) -> Any:
    """Make slime's rollout manager with what its methods on samples read."""
    from slime.ray.rollout import RolloutManager

    owner = RolloutManager.__ray_metadata__.modified_class
    made = owner.__new__(owner)
    made.args = args
    made.custom_reward_post_process_func = None
    made.custom_convert_samples_to_train_data_func = None
    return made


class Chunk:
    """A model of torch where slime expects one of Megatron's, called with one packed row."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.role = "actor"
        self.config = SimpleNamespace(timers=None, calculate_per_token_loss=False, num_moe_experts=None)

    def train(self) -> None:
        self.model.train()

    def eval(self) -> None:
        self.model.eval()

    def zero_grad_buffer(self) -> None:
        """Do nothing: the optimizer's `zero_grad` does it."""

    def __call__(self, input_ids: Any, **_: Any) -> Any:
        import torch

        positions = torch.arange(input_ids.shape[1]).unsqueeze(0)
        # Megatron's output is in float32.
        return self.model(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), position_ids=positions
        ).logits.float()


class Optimizer:
    """The state's optimizer behind the interface of Megatron's, which clips the norm of the gradient."""

    def __init__(self, optimizer: Any, clip_grad: float) -> None:
        self.optimizer, self.clip_grad = optimizer, clip_grad
        self.param_groups = optimizer.param_groups

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def scale_loss(self, loss: Any) -> Any:
        return loss

    def step(self) -> tuple[bool, float, None]:
        import torch

        parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.clip_grad or float("inf"))
        self.optimizer.step()
        return True, float(norm), None


class Schedule:
    """The state's scheduler behind the interface of Megatron's, which counts samples."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self, increment: int) -> None:
        self.scheduler.step()

    def get_lr(self, group: Mapping[str, Any]) -> float:
        rate: float = group["lr"]
        return rate


def forward_backward(
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    forward_only: bool = False,
    **_: Any,
) -> list[Any]:
    """Run Megatron's schedule without pipelining, whose own one makes a tensor on the GPU."""
    import torch
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    stored: list[Any] = []
    total = 0.0
    config = model[0].config
    for _step in range(num_microbatches):
        with torch.set_grad_enabled(not forward_only):
            output, loss_func = forward_step_func(data_iterator[0], model[0])
            if forward_only:
                stored.append(loss_func(output, non_loss_data=True)[1])
                continue
            loss, tokens = forward_step_calc_loss(
                model[0], output, loss_func, config, None, False, num_microbatches, stored
            )[:2]
            total += float(tokens)
            loss.backward()
    if config.calculate_per_token_loss and not forward_only:
        # As finalize_model_grads does.
        for parameter in model[0].model.parameters():
            if parameter.grad is not None:
                parameter.grad /= total
    return stored


def trained(
    args: argparse.Namespace, state: Any, rollout_data: dict[str, Any], has_reference: bool
) -> dict[str, float]:
    """Run `train_actor` of slime's actor on the data of one rollout -> what it logs, the mean over its updates."""
    import slime.backends.megatron_utils.actor as actors
    import slime.backends.megatron_utils.model as models

    # The actor's own names before August 2026.
    logs = getattr(actors, "train_metric_utils", actors)
    dumps = actors.train_data_utils if logs is not actors else actors.train_dump_utils
    logged: list[dict[str, float]] = []
    actor = actors.MegatronTrainRayActor.__new__(actors.MegatronTrainRayActor)
    chunk = Chunk(state.model)
    chunk.config.calculate_per_token_loss = args.calculate_per_token_loss
    own = state.model
    actor.args, actor.role, actor.model = args, "actor", [chunk]
    actor.optimizer = Optimizer(state.optimizer, args.clip_grad)
    actor.opt_param_scheduler = Schedule(state.scheduler)
    actor.rollout_data_postprocess = None
    actor.prof = SimpleNamespace(step=lambda **_: None)
    actor._active_model_tag = "actor"

    def restore(tag: str) -> None:
        chunk.model = state.ref_model if tag == "ref" else own

    actor.weights_backuper = SimpleNamespace(
        backup_tags={"actor", "ref"} if has_reference else {"actor"}, restore=restore, backup=lambda _: None
    )
    timer = actors.Timer()
    timer.start_time.clear()
    timer.start("train_wait")  # as the actor's init does
    actor.weight_updater = SimpleNamespace(pop_metrics=dict)

    def log(_: Any, metrics: Mapping[str, float], step_key: str) -> None:
        if step_key == "train/step":
            logged.append(dict(metrics))

    with (
        on_cpu(),
        patch.object(models, "get_forward_backward_func", lambda: forward_backward),
        patch.object(models, "get_args", lambda: args),
        patch.object(models, "get_model_config", lambda model: model.config),
        patch.dict(vars(models), {"_disable_tqdm_for_non_main_rank": lambda: True}),
        patch.object(models, "DDP", type("NoDDP", (), {})),
        patch.object(models.logging_utils, "log", log),
        patch.object(logs, "log_rollout_data", lambda *_, **__: None),
        patch.object(logs, "log_perf_data", lambda *_, **__: None),
        patch.object(dumps, "save_debug_train_data", lambda *_, **__: None),
    ):
        actor.train_actor(0, rollout_data)
    return {name: sum(each[name] for each in logged) / len(logged) for name in logged[0]}


def loss_function(args: argparse.Namespace, rows: int) -> Any:
    """Return slime's loss of a micro-batch, as a function of batch, number of micro-batches and logits.

    Args:
        args: slime's options.
        rows: number of rows of the update, an argument since May 2026 and an option before.
    """
    loss = part("slime.backends.megatron_utils.loss:loss_function")

    def of_micro_batch(batch: dict[str, Any], n_micro: int, logits: Any) -> Any:
        if takes(loss, "step_global_batch_size"):
            return loss(args, batch, n_micro, rows, logits)
        return loss(argparse.Namespace(**vars(args) | {"global_batch_size": rows}), batch, n_micro, logits)

    return of_micro_batch


def micro_loss(loss_func: Any, args: argparse.Namespace, n_micro: int, logged: list[Any]) -> Any:
    """Compute what goes backward of one micro-batch, as Megatron's schedule does, and keep what it logs."""
    import torch
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    config = SimpleNamespace(
        timers=None, num_moe_experts=None, calculate_per_token_loss=args.calculate_per_token_loss, grad_scale_func=None
    )
    output = torch.zeros(1, 1, 1)
    return forward_step_calc_loss(None, output, loss_func, config, None, False, n_micro, logged)[0]


def reduced(logged: list[Any], args: argparse.Namespace, rows: int) -> dict[str, float]:
    """Reduce what the micro-batches of all ranks logged; older trees do it within their training step."""
    import torch

    place = "slime.observability.train_metric_utils:reduce_train_step_metrics"
    if not has_part(place):
        return {}
    found: dict[str, float] = part(place)(
        logged,
        calculate_per_token_loss=args.calculate_per_token_loss,
        step_global_batch_size=rows,
        cp_size=1,
        dp_with_cp_group=torch.distributed.group.WORLD,
    )
    return found


def rollout_data(args: argparse.Namespace, samples: list[Any]) -> dict[str, Any]:
    """Turn samples into the data of the only rank, through the rollout manager and back out of Ray's store."""
    import slime.ray.rollout as rollouts
    import slime.utils.data as data_module
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    made = manager(args)
    made.set_train_parallel_config({"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1})
    with (
        patch.object(rollouts.ray, "put", lambda value, **_: value),
        patch.object(data_module.ray, "get", lambda value: value),
    ):
        split = made._split_train_data_by_dp
        ranks = {"dp_size": 1} if takes(split, "dp_size") else {}
        references = split(made._convert_samples_to_train_data(samples), **ranks)
        actor = MegatronTrainRayActor.__new__(MegatronTrainRayActor)
        actor.args = args
        found: dict[str, Any] = actor._get_rollout_data(references)
    return found
