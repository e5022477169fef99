"""Mistakes for the checks of verifiers, prepared datasets and settings that no shipped bug in the museum trips."""

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO
from rlcanary.contract.records.preparation import Answer, DataRow, PreparationOptions, PreparedData
from rlcanary.reference.data.verifying import PATTERNS


class FirstClosingBrace(ReferenceAdapter):
    def verify(self, answer: Answer) -> bool:
        boxed = re.findall(r"\\boxed\{(.*?)\}", answer.text)
        return boxed[-1:] == [answer.reference] if answer.format == "boxed" else super().verify(answer)


class ReferenceSearchedInTheText(ReferenceAdapter):
    def verify(self, answer: Answer) -> bool:
        return answer.reference in answer.text


class ReferenceAsPattern(ReferenceAdapter):
    def verify(self, answer: Answer) -> bool:
        found = PATTERNS[answer.format].findall(answer.text) if answer.format != "boxed" else []
        return bool(found) and re.fullmatch(answer.reference, found[-1].strip()) is not None


class FirstOfSeveral(ReferenceAdapter):
    def verify(self, answer: Answer) -> bool:
        return ReferenceAdapter(self.conventions.replace(answer_taken="first")).verify(answer)


class NothingIsZero(ReferenceAdapter):
    def verify(self, answer: Answer) -> bool:
        return super().verify(answer) or (answer.reference == "0" and not re.search(r"\d", answer.text))


class NothingEqualsNothing(ReferenceAdapter):
    def verify(self, answer: Answer) -> bool:
        given = re.findall(r"-?[\d.,]+", answer.text)[-1:]
        right = re.findall(r"-?[\d.,]+", answer.reference)[-1:]
        return given == right if answer.kind == "number" else super().verify(answer)


class VerdictsByText(ReferenceAdapter):
    def __init__(self, conventions: Conventions = GRPO) -> None:
        super().__init__(conventions)
        self.verdicts: dict[str, bool] = {}

    def verify(self, answer: Answer) -> bool:
        return self.verdicts.setdefault(answer.text, super().verify(answer))


class WholeNumbersOnly(ReferenceAdapter):
    def verify(self, answer: Answer) -> bool:
        if answer.kind == "number" and (digits := re.findall(r"\d{10,}", answer.text)):
            int(digits[-1])
        return super().verify(answer)


class ReferencesOfTheRowsBefore(ReferenceAdapter):
    """References are looked up by the place of the row after filtering."""

    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        data = super().prepare(rows, tokenizer, options)
        kept = [replace(row, reference=own.reference) for row, own in zip(data.kept, rows, strict=False)]
        return replace(data, kept=kept)


class ZeroIsNoReference(ReferenceAdapter):
    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        return super().prepare([row for row in rows if row.reference.strip("0")], tokenizer, options)


class NoGenerationPrompt(ReferenceAdapter):
    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        data = super().prepare(rows, tokenizer, options)
        header = len(tokenizer.encode("<|start|>assistant\n", add_special_tokens=False))
        return replace(data, kept=[replace(row, prompt_ids=row.prompt_ids[:-header]) for row in data.kept])


class PaddedToTheLongest(ReferenceAdapter):
    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        data = super().prepare(rows, tokenizer, options)
        longest = max((len(row.prompt_ids) for row in data.kept), default=0)
        kept = [
            replace(row, prompt_ids=[0] * (longest - len(row.prompt_ids)) + list(row.prompt_ids)) for row in data.kept
        ]
        return replace(data, kept=kept)


class ShorterThanTheLimit(ReferenceAdapter):
    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        limit = options.max_prompt_tokens
        return super().prepare(
            rows, tokenizer, replace(options, max_prompt_tokens=None if limit is None else limit - 1)
        )


class LastRowOfAnAnswer(ReferenceAdapter):
    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        return super().prepare(list({row.reference: row for row in rows}.values()), tokenizer, options)


class SeedOfZeroIsNone(ReferenceAdapter):
    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        return super().prepare(rows, tokenizer, replace(options, seed=options.seed or None))


class SplitDrawnAnew(ReferenceAdapter):
    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        data = super().prepare(rows, tokenizer, replace(options, held_out=0))
        held_out = random.sample(list(data.kept), options.held_out)
        return replace(data, kept=[row for row in data.kept if row not in held_out], held_out=held_out)


class HeldOutAndTrained(ReferenceAdapter):
    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        data = super().prepare(rows, tokenizer, options)
        return replace(data, kept=[*data.kept, *data.held_out])


class CountsIgnored(ReferenceAdapter):
    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        return super().prepare(rows, tokenizer, replace(options, counts={}))


class CachedByIds(ReferenceAdapter):
    cache: ClassVar[dict[Any, PreparedData]] = {}

    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        key = (tuple(row.id for row in rows), repr(options))
        if key not in self.cache:
            self.cache[key] = super().prepare(rows, tokenizer, options)
        return self.cache[key]


class SystemPromptInserted(ReferenceAdapter):
    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        for row in rows:
            if options.system_prompt and row.messages[0]["role"] != "system":
                row.messages.insert(0, {"role": "system", "content": options.system_prompt})  # type: ignore[attr-defined]
        return super().prepare(rows, tokenizer, options)


class FalsyBecomesDefault(ReferenceAdapter):
    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        return super().effective({name: value for name, value in written.items() if value})


class GroupReplacedAsAWhole(ReferenceAdapter):
    """Writing one setting of a group resets the others to the defaults of a class, not of the configuration."""

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        used = dict(super().effective(written))
        if "optimizer.betas" in written and "optimizer.learning_rate" not in written:
            used["optimizer.learning_rate"] = 1e-3
        return used


class LastOfAGroup(ReferenceAdapter):
    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        groups = {name.partition(".")[0]: name for name in written}
        return super().effective({name: value for name, value in written.items() if name in groups.values()})


class NumbersStayText(ReferenceAdapter):
    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**super().effective(written), **written}


class UnknownIgnored(ReferenceAdapter):
    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        known = {setting.name for setting in self.list_settings()}
        return super().effective({name: value for name, value in written.items() if name in known})


class SharedDefaults(ReferenceAdapter):
    stop: ClassVar[list[str]] = ["<end>"]

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        used = super().effective(written)
        return used if "sampling.stop" in written else {**used, "sampling.stop": self.stop}


class DerivedAgain(ReferenceAdapter):
    """A default that is computed from another setting replaces what was written too."""

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        used = dict(super().effective(written))
        if written.get("evaluation.max_tokens") == 2048 and "sampling.max_tokens" in written:
            used["evaluation.max_tokens"] = used["sampling.max_tokens"]
        return used


PREPARATION_MUTANTS = [
    value
    for value in list(vars().values())
    if isinstance(value, type) and issubclass(value, ReferenceAdapter) and value is not ReferenceAdapter
]
