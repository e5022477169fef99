"""A data pipeline by hand: answers are compared as text, prompts are built as text, settings are nested dataclasses.

Conversations take place one after another, with a row for each answer.

The first answer counts, prompts that are too long lose their first tokens, and repeated rows are dropped. What is dropped is
not told.
"""

import math
import random
from dataclasses import dataclass, field, fields

import torch

from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.conversations import ConversationRow, Episode
from rlcanary.contract.records.preparation import PreparedData, PreparedRow, Setting


@dataclass
class AdamSettings:
    lr: float = 5e-7
    eps: float = 1e-8
    amsgrad: bool = False


@dataclass
class RolloutSettings:
    n: int = 8
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    name: str = ""


@dataclass
class RunSettings:
    adam: AdamSettings = field(default_factory=AdamSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    steps: int = 100
    warmup: int | None = None


EXAMPLES = {
    "adam.lr": [1e-6, 0.0],
    "adam.eps": [1e-5],
    "adam.amsgrad": [True, False],
    "rollout.n": [4],
    "rollout.top_k": [50, None],
    "rollout.stop": [("</answer>", "\n\n"), ()],
    "rollout.name": ["vllm", ""],
    "steps": [10],
    "warmup": [3, 0],
}


class DataPipeline(Adapter):
    name = "data-pipeline"
    conventions = Conventions(
        answer_taken="first", long_prompt="left", equal_prompts="drop", overlong_buffer=6, overlong_penalty=0.8
    )

    # Rewards.

    def shape_rewards(self, rewards, lengths):
        shaped = rewards.clone()
        for row, length in enumerate(lengths.completions.tolist()):
            tokens_too_many = length - (lengths.max_new_tokens - self.conventions.overlong_buffer)
            if tokens_too_many > 0:
                shaped[row] -= self.conventions.overlong_penalty / self.conventions.overlong_buffer * tokens_too_many
        return shaped

    def combine_rewards(self, parts):
        """One function after the other, as a team's trainer grows them."""
        sums, said = [0.0] * len(parts.values), [False] * len(parts.values)
        for function, weight in enumerate(parts.weights):
            for row, value in enumerate(parts.values[:, function].tolist()):
                if not math.isnan(value):
                    sums[row] += weight * value
                    said[row] = True
        return torch.tensor([total if any_said else math.nan for total, any_said in zip(sums, said, strict=True)])

    # Answers.

    def verify(self, answer):
        readers = {
            ("number", "hash"): self._behind("####"),
            ("math", "boxed"): self._box,
            ("choice", "line"): self._behind("\nAnswer:"),
            ("exact", "bare"): lambda text: text,
        }
        if (answer.kind, answer.format) not in readers:
            raise NotProvided("there is no such verifier")
        given = readers[answer.kind, answer.format](answer.text)
        if answer.kind == "number":
            given = given.replace(",", "")
        return bool(given.strip()) and "".join(given.split()) == "".join(answer.reference.split())

    def _behind(self, marker):
        return lambda text: text.partition(marker)[2].partition("\n")[0]

    def _box(self, text):
        """The content of the first box, found from its end: braces are taken off a stack."""
        opened = []
        for place, letter in enumerate(text):
            if letter == "{":
                opened.append(place)
            elif letter == "}" and opened:
                start = opened.pop()
                if text[:start].endswith("\\boxed"):
                    return text[start + 1 : place]
        return ""

    # Rows.

    def prepare(self, rows, tokenizer, options):
        unique = {}
        for row in rows:
            unique.setdefault((str(list(row.messages)), row.reference), row)
        kept = [self._row(row, tokenizer, options) for row in unique.values()]
        if options.seed is not None:
            random.Random(options.seed).shuffle(kept)
        left = dict(options.counts)
        taken = []
        for row in kept:
            if left.get(row.dataset, 1) > 0:
                taken.append(row)
            if row.dataset in left:
                left[row.dataset] -= 1
        held_out = taken[: options.held_out]
        return PreparedData(taken[options.held_out :], held_out)

    def _row(self, row, tokenizer, options):
        system = options.system_prompt
        messages = list(row.messages)
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        limit = options.max_prompt_tokens
        return PreparedRow(row.id, ids if limit is None else ids[-limit:], row.reference, row.dataset)

    # Conversations.

    def converse(self, engine, tokenizer, tasks, environment, options):
        """One after another, a row per answer: each prompt is the text so far, encoded anew, and the row begins with it."""
        return [
            [
                self._talk(engine, tokenizer, task, environment, options, number)
                for number in range(options.sampling["n"])
            ]
            for task in tasks
        ]

    def _talk(self, engine, tokenizer, task, environment, options, number):
        session, messages, rows, rewards = environment.start(task.id), list(task.messages), [], []
        budget = options.sampling["max_new_tokens"]
        while options.max_turns is None or len(rows) < options.max_turns:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False).input_ids
            if options.max_tokens is not None and len(ids) + budget > options.max_tokens:
                break
            seed = options.sampling["seed"]
            request = {**options.sampling, "n": 1, "seed": None if seed is None else seed + 1000 * number + len(rows)}
            ((answer,),) = engine.generate([ids], request)
            rows.append(ConversationRow(ids, answer))
            messages.append({"role": "assistant", "content": answer.text})
            if answer.finish_reason == "length":
                break
            reply = session.reply(answer.text)
            rewards.append(reply.reward)
            if reply.ended:
                break
            messages.extend(reply.messages)
        return Episode(task.id, rows, sum(rewards) if rewards else math.nan)

    # Settings.

    def list_settings(self):
        return [Setting(name, values) for name, values in EXAMPLES.items()]

    def effective(self, written):
        run = RunSettings()
        for name, value in written.items():
            *group, last = name.split(".")
            part = getattr(run, group[0]) if group else run
            if last not in {each.name for each in fields(part)}:
                raise AttributeError(name)
            example = EXAMPLES[name][0]
            if (
                value is not None
                and not isinstance(value, type(example))
                and not (isinstance(value, list) and isinstance(example, tuple))
            ):
                raise TypeError(name)
            setattr(part, last, value)
        parts = {"adam": run.adam, "rollout": run.rollout}
        nested = {
            f"{group}.{each.name}": getattr(part, each.name) for group, part in parts.items() for each in fields(part)
        }
        return {**nested, "steps": run.steps, "warmup": run.warmup}
