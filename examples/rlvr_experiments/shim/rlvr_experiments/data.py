"""Datasets and their items: `rlcanary.grpo.data`. A row's target is their problem, which has the id."""

from pathlib import Path

import ray.data

from rlcanary.grpo.data.datasets import Row, in_sequence, weighted
from rlcanary.grpo.data.items import ItemIterator, shuffled
from rlcanary.grpo.data.templates import prompt_ids

GSM8K_MAX_COMPLETION_LEN = 512


def load_dummy(num_samples=64):
    """Load one question as many times."""
    problem = {
        "answer": "1",
        "verifier_type": "math",
        "system_prompt": r"End with the answer in \boxed{}.",
        "assistant_prefix": "",
        "max_completion_len": GSM8K_MAX_COMPLETION_LEN,
    }
    prompt = "\n\nProblem: What is 2 (1/3 + 1/6)?"
    rows = [{"prompt": prompt, "problem": problem | {"prompt_id": f"dummy_{index}"}} for index in range(num_samples)]
    return ray.data.from_items(rows)


def load_mixed(datasets, mode="weighted", seed=42):
    """Join datasets -> all their rows, and the ids in the order of the first epoch."""
    if mode not in ("weighted", "sequential"):
        raise ValueError(f"mode must be weighted or sequential, not {mode!r}")
    rows, ids, weights, counts, files = [], {}, {}, {}, []
    for place, given in enumerate(datasets):
        if "name" not in given:
            raise ValueError(f"a dataset must have a 'name' key: {given}")
        if given["name"] != "dummy":
            raise ValueError(f"Unknown dataset {given['name']!r}: there is dummy")
        name = f"dummy, number {place}"
        loaded = load_dummy(given["num_samples"]).take_all()
        rows += loaded
        ids[name] = [row["problem"]["prompt_id"] for row in loaded]
        weights[name], counts[name] = given.get("weight", 1.0), given.get("count", len(loaded))
        files += [given["order_file"]] if "order_file" in given else []
    if files:
        # One file orders all items of a run.
        (file,), (count,) = files, counts.values()
        order = Path(file).read_text().split()[:count]
    else:
        order = (weighted(ids, weights, seed) if mode == "weighted" else in_sequence(ids, counts, seed))(0)
    return ray.data.from_items(rows), order


class DataIterator:
    """An `ItemIterator` over the rows of a dataset."""

    def __init__(self, ds, tokenizer, system_prompt="", assistant_prefix="", order=None):
        self._tokenizer, self._system_prompt, self._prefix = tokenizer, system_prompt, assistant_prefix
        rows = [_row(given) for given in ds.take_all()]
        self._all = [row.id for row in rows]
        self._fixed = self._ids = order
        self._items = ItemIterator(rows, order=lambda _: self._ids)
        self.mark_done, self.mark_pending = self._items.mark_done, self._items.mark_pending

    def new_epoch(self, seed=None, order=None):
        """Make the epoch's items pending, in this order, or that of the constructor, or one by the seed, or all."""
        drawn = self._all if seed is None else shuffled(self._all, seed)(0)
        self._ids = order or self._fixed or drawn
        self._items.start_epoch()

    def get_next(self):
        """Put the next item in flight -> its text and row; None if there is none."""
        row = self._items.next_item()
        if row is None:
            return None
        text = self._tokenizer.decode(prompt_ids(row.messages(self._system_prompt), self._tokenizer))
        prefix = self._prefix if row.answer_prefix is None else row.answer_prefix
        return {"template": text + prefix, "prompt": row.prompt, "problem": row.target}

    def mark_failed(self, prompt_id):
        """Mark an item as failed for good."""
        self._items.mark_failed(prompt_id, "marked as failed", final=True)


def _row(given):
    problem = given["problem"]
    own = problem.get("system_prompt"), problem.get("assistant_prefix")
    return Row(problem["prompt_id"], given["prompt"], problem, "math", "unknown", *own)
