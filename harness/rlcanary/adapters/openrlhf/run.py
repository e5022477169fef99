"""OpenRLHF's experience maker and workers in this process: their own methods on objects without Ray or DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rlcanary.adapters.frameworks import quiet

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def on_cpu() -> Iterator[None]:
    """Run workers, which ask for the current GPU and for Ray's store, on the CPU and on plain objects."""
    import ray
    import torch
    from openrlhf.trainer.ray import ppo_actor

    with ExitStack() as stack:
        for place, name, value in (
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.cuda, "synchronize", lambda: None),
            (ray, "get", lambda value: value),
            (ray, "put", lambda value: value),
            (ray, "wait", lambda refs, **_: (refs, [])),
            (ppo_actor, "torch_dist_barrier_and_cuda_sync", lambda: None),
        ):
            stack.enter_context(patch.object(place, name, value))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(quiet())
        yield


class Remote:
    """An actor of Ray whose methods are called in place."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.target, name))


def group_of(worker: Any) -> Any:
    """Make the group of one worker."""
    from openrlhf.trainer.ray.launcher import RayActorGroup

    group = RayActorGroup.__new__(RayActorGroup)
    group._actor_handlers = [Remote(worker)]
    group.duplicate_actors = 1
    return group


def class_of(actor: Any) -> Any:
    """Return the class that Ray made an actor of."""
    return actor.__ray_metadata__.modified_class


def strategy_of(args: Any) -> Any:
    """Make the DeepSpeed strategy of one rank."""
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    strategy = DeepspeedStrategy.__new__(DeepspeedStrategy)
    strategy.args = args
    strategy.accumulated_gradient = 1
    strategy.is_rank_0 = lambda: True
    strategy.all_reduce = lambda data, *_: data
    return strategy


def maker_of(args: Any, actor: Any = None, reference: Any = None, pad_token_id: int = 0) -> Any:
    """Make the experience maker of some workers."""
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
    from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController

    return RemoteExperienceMaker(
        actor_model_group=actor and group_of(actor),
        critic_model_group=None,
        reward_model_group=None,
        initial_model_group=reference and group_of(reference),
        kl_controller=FixedKLController(args.algo.kl.init_coef),
        strategy=strategy_of(args),
        tokenizer=SimpleNamespace(pad_token_id=pad_token_id),
    )


def generator_of(args: Any) -> Any:
    """Make the generator of samples, whose engines are left out."""
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

    return SamplesGenerator(strategy_of(args), None, None, None, [])


def response_of(
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    sampled: Sequence[bool] | None,
    logprobs: Sequence[float] | None,
    reward: float,
) -> dict[str, Any]:
    """Return a completion as the rollout worker hands it to the generator of samples."""
    start = len(prompt_ids)
    kept = [True] * len(token_ids) if sampled is None else list(sampled)
    return {
        "prompt": "",
        "label": "",
        "observation_tokens": [*prompt_ids, *token_ids],
        "action_ranges": [(start + index, start + index + 1) for index, is_sampled in enumerate(kept) if is_sampled],
        "rollout_log_probs": None if logprobs is None else [0.0] * start + list(logprobs),
        "reward": reward,
        "scores": reward,
    }


def engine_of(state: Any, max_norm: float) -> Any:
    """Make a stand-in for DeepSpeed's engine of one rank, which owns the clipping and the schedule."""
    import torch

    class Engine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = state.model
            self.norm: Tensor | None = None

        def forward(self, *args: Any, **options: Any) -> Any:
            return self.module(*args, **options)

        def backward(self, loss: Tensor) -> None:
            loss.backward()

        def step(self) -> None:
            """Update, and advance the schedule."""
            self.norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm or torch.inf)
            state.optimizer.step()
            state.scheduler.step()
            state.optimizer.zero_grad()

        def get_global_grad_norm(self) -> Tensor | None:
            return self.norm

    return Engine()


def actor_of(model: Any, temperature: float) -> Any:
    """Make OpenRLHF's `Actor` of a model or an engine, without packing."""
    from openrlhf.models import Actor

    actor = Actor(model, temperature=temperature)
    actor.packing_samples = False
    return actor
