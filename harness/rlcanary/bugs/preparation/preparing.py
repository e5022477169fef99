"""Bugs in the preparation of datasets."""

from dataclasses import replace
from typing import Any

from rlcanary.bugs.museum import Bug
from rlcanary.contract.records.preparation import DataRow, PreparationOptions, PreparedData


class LettersAgainstTokens(Bug):
    id = "slime.letters-against-token-limit"
    source = "slime 79fd101bd, #548"
    effect = "the limit on tokens is applied to letters: most long prompts are dropped three to four times too early"

    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        if (limit := options.max_prompt_tokens) is not None:
            rows = [row for row in rows if len("".join(each["content"] for each in row.messages)) <= limit]
            options = replace(options, max_prompt_tokens=None)
        return super().prepare(rows, tokenizer, options)


class LengthFilterNeverReached(Bug):
    id = "open-instruct.length-filter-never-reached"
    source = "open-instruct 21e092b16, #1597"
    effect = "the test of the length stands behind a return: texts that are too long are kept, and truncated later"

    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        return super().prepare(rows, tokenizer, replace(options, max_prompt_tokens=None))


class EveryPrefixARow(Bug):
    id = "open-instruct.every-prefix-a-row"
    source = "open-instruct 853377e82"
    effect = "every prefix of a conversation is a row: early turns are trained many times over"

    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        prefixes = [
            replace(row, messages=row.messages[: end + 1])
            for row in rows
            for end, message in enumerate(row.messages)
            if message["role"] == "user"
        ]
        return super().prepare(prefixes, tokenizer, options)
