"""nano-aha-moment as an adapter: its functions, and the part of its `main` that trains on one batch, on a model of torch.

`main` is one function. The statements from the batch to the end of its loop over micro-batches are run as they stand in it.
Written for nano-aha-moment of July 2025.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

from rlcanary.adapters.batches import prompts_of, tokens_of_completions
from rlcanary.adapters.frameworks import quiet, usable
from rlcanary.adapters.stubs import absent
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import Completion
from rlcanary.contract.conventions import Conventions

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, Group

FIRST = "model_inputs = prepare_model_inputs("


class NanoAhaAdapter(Adapter):
    """Adapter of nano-aha-moment with its default algorithm, GRPO, and the micro-batches of one row."""

    name = "nano_aha"

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Import the script.

        Args:
            settings: options of its command line, `kl_coeff` and `temperature`.
        """
        with (
            usable("nano_r1_script", "put a checkout of nano-aha-moment on PYTHONPATH", "its tree of July 2025"),
            absent("deepspeed", "wandb"),
            quiet(),
        ):
            import nano_r1_script
        self.script = nano_r1_script
        self.settings = dict(settings or {})
        defaults = vars(nano_r1_script.arg_parser.parse_args([]))
        self.options = SimpleNamespace(**{**defaults, **self.settings})
        self.conventions = Conventions(
            advantage_ddof=0,
            advantage_eps=1e-4,
            objective="reinforce",
            clip_low=None,
            clip_high=None,
            aggregation="token_mean",
            logprobs_upcast=False,
            old_logprobs="trainer",
            kl_estimator="k3",
            kl_coef=self.options.kl_coeff,
            temperature=self.options.temperature,
            training_dropout=True,
            max_grad_norm=1.0,
        )

    def configured(self, **changes: Any) -> Self:
        names = {"kl_coef": "kl_coeff", "temperature": "temperature"}
        wanted = self.conventions.replace(**changes)
        found = {names[name]: value for name, value in changes.items() if name in names}
        made = type(self)({**self.settings, **found})
        if made.conventions != wanted:
            raise NotProvided("nano-aha-moment has options for the KL and the temperature alone")
        return made

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        if temperature != 1.0:
            raise NotProvided("compute_token_log_probs divides the logits by the temperature, before they are scored")
        with eager():
            return self.script.compute_token_log_probs.__globals__["log_softmax_and_gather"](logits, token_ids)  # type: ignore[no-any-return]

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        import torch

        rows = _rows(batch)
        inputs = self._inputs(rows, [0.0] * len(rows))
        with eager():
            scored = self.script.compute_token_log_probs(_engine(model), inputs, temperature)
        width = batch.completion_ids.shape[1]
        own = [scored[number, len(prompt) - 1 :][: len(ids)] for number, (prompt, ids) in enumerate(rows)]
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=torch.nan) for row in own])

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        import torch

        order = torch.argsort(group_ids, stable=True)
        _, counts = torch.unique(group_ids, return_counts=True)
        if len(counts.unique()) > 1:
            raise NotProvided("GENERATIONS_PER_SAMPLE is one number for all prompts")
        given = iter(rewards[order].tolist())
        size = int(counts[0])
        with patch.object(self.script, "compute_reward", lambda *_: (next(given), {})):
            episodes, _ = self.script.create_training_episodes(
                samples=[{"input_ids": [1]}] * len(counts),
                all_generations=[[2]] * len(rewards),
                all_finish_reasons=["stop"] * len(rewards),
                tokenizer=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
                EOS_TOKEN="",
                GENERATIONS_PER_SAMPLE=size,
            )
        found = torch.tensor([float(each[0]) for each in episodes["all_advantages"]])
        return found[torch.argsort(order)]

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        import torch

        if not bool((batch.completion_mask == tokens_of_completions(batch)).all()):
            raise NotProvided("every token of a response is trained")
        if batch.ref_logprobs is not None or state.ref_model is None:
            raise NotProvided("the reference's logprobs are always computed from its model")
        rows = _rows(batch)
        advantages = self.advantages(batch.rewards, batch.group_ids).tolist()
        metrics: dict[str, list[float]] = {}
        engine = _engine(state.model, state, len(rows))
        reference = _engine(state.ref_model)
        names = {
            "episodes": {
                "all_query_token_ids": [prompt for prompt, _ in rows],
                "all_response_token_ids": [ids for _, ids in rows],
                "all_advantages": [[each] * len(ids) for each, (_, ids) in zip(advantages, rows, strict=True)],
            },
            "curr_cuda_device": torch.device("cpu"),
            "reference_model": reference,
            "policy_model": engine,
            "EPISODES_PER_ITERATION_PER_RANK": len(rows),
            "PER_DEVICE_BATCH_SIZE": 1,
            "TEMPERATURE": self.options.temperature,
            "KL_COEFFICIENT": self.options.kl_coeff,
            "metrics": metrics,
            "dist": SimpleNamespace(get_rank=lambda: 1),
            "time": SimpleNamespace(sleep=lambda _: None, time=time.time),
        }
        with eager(), quiet():
            exec(_training(self.script), {**vars(self.script), **names})
        logged = {"grad_norm": engine.norm, "lr": state.optimizer.param_groups[0]["lr"]}
        return {**logged, "loss": sum(metrics["loss"]), "policy_loss": sum(metrics["policy_loss"])}

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        import torch

        from rlcanary.contract.batch import CollatedBatch

        pairs = [(group, each) for group in groups for each in group.completions]
        if any(each.sampled is not None for _, each in pairs) or any(group.ref_logprobs for group in groups):
            raise NotProvided("every token of a response is trained, and the reference scores a whole batch")
        rows = [(list(group.prompt_ids), list(_ids(each))) for group, each in pairs]
        found = self._inputs(rows, [0.0] * len(rows))
        widths = [len(ids) for _, ids in rows]
        starts = [len(prompt) for prompt, _ in rows]

        def completions(values: Tensor, fill: int) -> Tensor:
            parts = [
                values[row, start : start + width]
                for row, (start, width) in enumerate(zip(starts, widths, strict=True))
            ]
            return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)

        kept = found["attention_mask"].bool()
        return CollatedBatch(
            input_ids=found["input_ids"],
            attention_mask=kept,
            position_ids=torch.arange(kept.shape[1]).expand(kept.shape) * kept,
            completion_starts=torch.tensor(starts),
            completion_ids=completions(found["input_ids"], pad_token_id),
            completion_mask=completions(found["labels_mask"], 0).bool(),
            rewards=torch.tensor([float(reward) for group in groups for reward in group.rewards]),
            group_ids=torch.tensor([number for number, group in enumerate(groups) for _ in group.completions]),
            item_ids=[group.item_id for group, _ in pairs],
        )

    def _inputs(self, rows: list[tuple[list[int], list[int]]], advantages: list[float]) -> dict[str, Tensor]:
        import torch

        found: dict[str, Tensor] = self.script.prepare_model_inputs(
            query_token_ids=[prompt for prompt, _ in rows],
            response_token_ids=[ids for _, ids in rows],
            advantages=[[each] * len(ids) for each, (_, ids) in zip(advantages, rows, strict=True)],
            device=torch.device("cpu"),
        )
        return found


def _ids(completion: Completion) -> list[int]:
    return list(completion.token_ids)


def _rows(batch: CollatedBatch) -> list[tuple[list[int], list[int]]]:
    kept = tokens_of_completions(batch)
    pairs = zip(prompts_of(batch), batch.completion_ids, kept, strict=True)
    return [(prompt.tolist(), ids[own].tolist()) for prompt, ids, own in pairs]


def _training(script: Any) -> Any:
    """Compile the statements of `main` from the batch to the end of the loop over micro-batches."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(script.main)))
    for loop in ast.walk(tree):
        body = getattr(loop, "body", None)
        if not isinstance(body, list):
            continue
        starts = [number for number, each in enumerate(body) if ast.unparse(each).startswith(FIRST)]
        if not starts:
            continue
        ends = [number for number, each in enumerate(body) if isinstance(each, ast.For) and number > starts[0]]
        return compile(ast.Module(body[starts[0] : ends[-1] + 1], []), inspect.getfile(script), "exec")
    raise NotProvided("main has no such statements")


@contextlib.contextmanager
def eager() -> Any:
    """Run compiled functions as they are written."""
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


def _engine(model: Any, state: Any = None, steps: int = 1) -> Any:
    """Make a stand-in for DeepSpeed's engine, whose optimizer steps behind the last micro-batch and clips the norm at 1."""
    import torch

    class Engine:
        norm = 0.0
        calls = 0

        def __init__(self) -> None:
            self.module = SimpleNamespace(to=lambda _: None)

        def __call__(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
            positions = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
            return model(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions)

        def train(self) -> None:
            model.train()

        def eval(self) -> None:
            model.eval()

        def cpu(self) -> None:
            """Do nothing: it is there."""

        def get_global_grad_norm(self) -> None:
            return None

        def backward(self, loss: Tensor, scale_wrt_gas: bool) -> None:
            if scale_wrt_gas:
                loss = loss / steps
            loss.backward()

        def step(self) -> None:
            self.calls += 1
            if self.calls == steps:
                parameters = [each for group in state.optimizer.param_groups for each in group["params"]]
                self.norm = float(
                    torch.nn.utils.clip_grad_norm_([each for each in parameters if each.grad is not None], 1.0)
                )
                state.optimizer.step()
                state.scheduler.step()
                state.optimizer.zero_grad()

    return Engine()
