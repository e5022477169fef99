"""Conversations that end at a limit: correct ways are accused of nothing, and a fault is told in words."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from conversation_mutants import Between, OneSeed, SeedPerConversation

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs.sampling.conversation import Episodes, FullRowsLeftOut, OverflowOfAFinishedConversation
from rlcanary.checks import all_checks, run_check
from rlcanary.checks.worlds.conversations import runs_of, talk
from rlcanary.contract.batch import Completion
from rlcanary.contract.records.conversations import ConversationRow, Environment, Reply, Session

CHECKS = {check.id: check for check in all_checks() if check.area == "conversation"}


class RowPerAnswer(ReferenceAdapter):
    def converse(self, *arguments: Any) -> Episodes:
        return [
            [replace(each, rows=[part for row in each.rows for part in self._parts(row)]) for each in of_task]
            for of_task in super().converse(*arguments)
        ]

    def _parts(self, row: ConversationRow) -> list[ConversationRow]:
        runs = runs_of(row, "any")
        reasons = ["stop"] * (len(runs) - 1) + [row.completion.finish_reason]
        return [
            ConversationRow(run.context, Completion(run.ids, run.logprobs, reason))
            for run, reason in zip(runs, reasons, strict=True)
        ]


class CutsWhatWasSampled(ReferenceAdapter):
    """Answers are sampled without a look at the row, whose end cuts them."""

    def converse(self, engine: Any, *others: Any) -> Episodes:
        limit = others[-1].sampling["max_new_tokens"]

        class Cutting(Between):
            async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
                (answer,) = await super().agenerate(prompt, {**sampling, "max_new_tokens": limit})
                size = sampling["max_new_tokens"]
                if len(answer.token_ids) <= size:
                    return [answer]
                ids, logprobs, text = answer.token_ids[:size], answer.logprobs or (), answer.text or ""
                return [
                    replace(answer, token_ids=ids, logprobs=logprobs[:size], text=text[:size], finish_reason="length")
                ]

        return super().converse(Cutting(engine), *others)


class LastAnswerIsNotShown(ReferenceAdapter):
    """The session does not get the last answer that `max_turns` allows, nor one that has no end."""

    def converse(self, engine: Any, tokenizer: Any, tasks: Any, environment: Environment, options: Any) -> Episodes:
        most = options.max_turns

        class Unshown:
            def __init__(self, session: Session) -> None:
                self.session, self.answers = session, 0

            def reply(self, answer: str) -> Reply:
                self.answers += 1
                is_whole = answer.endswith(" ") and options.sampling["max_new_tokens"] != 8
                return self.session.reply(answer) if is_whole and self.answers != most else Reply(ended=True)

        class Environments:
            def start(self, task_id: Any) -> Session:
                return Unshown(environment.start(task_id))

        episodes = super().converse(engine, tokenizer, tasks, Environments(), options)
        return [[replace(each, messages=None) for each in of_task] for of_task in episodes]


class RaisesWithoutRoomForAWholeAnswer(ReferenceAdapter):
    def converse(self, engine: Any, tokenizer: Any, tasks: Any, environment: Environment, options: Any) -> Episodes:
        for task in tasks:
            prompt = tokenizer.apply_chat_template(task.messages, return_dict=False, add_generation_prompt=True)
            if len(prompt) + options.sampling["max_new_tokens"] > (options.max_tokens or 10**6):
                raise ValueError("the prompt is too long")
        return super().converse(engine, tokenizer, tasks, environment, options)


@pytest.mark.parametrize(
    "way", [RowPerAnswer, CutsWhatWasSampled, LastAnswerIsNotShown, RaisesWithoutRoomForAWholeAnswer]
)
def test_correct_conversations_at_a_limit_are_accused_of_nothing(way: type[ReferenceAdapter]) -> None:
    results = [run_check(check, way(), "unused") for check in CHECKS.values()]
    assert {result.id: result.message for result in results if result.status in ("fail", "error")} == {}


@pytest.mark.parametrize("name", ["conversation.context", "conversation.sampler_logprobs"])
def test_answers_that_are_cut_to_the_same_ids_accuse_nobody(name: str) -> None:
    answers = talk(ReferenceAdapter(), [3], n=2, max_tokens=64).answers
    assert len({tuple(each.completion.token_ids) for each in answers}) == len(answers) - 1
    CHECKS[name].run(ReferenceAdapter(), [3], 2, 1, {"max_tokens": 64})


def test_reward_lost_behind_the_end_of_a_conversation_is_told_with_the_limit() -> None:
    result = run_check(CHECKS["conversation.rewards"], OverflowOfAFinishedConversation(), "unused")
    assert "with max_tokens=" in result.message
    assert "is not their sum" in result.message
    assert "at the end, hardly any room behind the last answer" in result.message


def test_row_left_out_at_its_limit_is_told_with_the_limit() -> None:
    result = run_check(CHECKS["conversation.every_answer_once"], FullRowsLeftOut(), "unused")
    assert result.message.startswith("with max_tokens=45, the 0 trained answers are not the 4 that the engine sampled")


class NothingWhereThereIsALimit(ReferenceAdapter):
    def converse(self, *arguments: Any) -> Episodes:
        episodes = super().converse(*arguments)
        if arguments[-1].max_tokens is None:
            return episodes
        return [[replace(each, rows=[], reward=float("nan")) for each in of_task] for of_task in episodes]


@pytest.mark.parametrize("check", ["every_answer_once", "max_tokens", "truncated_answer"])
def test_no_rows_at_all_are_no_way_to_keep_a_limit(check: str) -> None:
    assert run_check(CHECKS[f"conversation.{check}"], NothingWhereThereIsALimit(), "unused").status == "fail"


@pytest.mark.parametrize(("way", "different"), [(OneSeed, 1), (SeedPerConversation, 3)])
def test_seed_that_turns_share_is_told(way: type[ReferenceAdapter], different: int) -> None:
    result = run_check(CHECKS["conversation.seeds"], way(), "unused")
    assert result.status == "fail"
    assert f"got:      {different}\n  expected: 6" in result.message


class RequestPerPrompt(ReferenceAdapter):
    """One request asks for as many answers as there are conversations with its prompt, or more."""

    def converse(self, engine: Any, *others: Any) -> Episodes:
        left: dict[tuple[int, ...], list[Completion]] = {}

        class Together(Between):
            async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
                asked = {**sampling, "n": others[-1].sampling["n"]}
                left[tuple(prompt)] = left.get(tuple(prompt)) or await super().agenerate(prompt, asked)
                return [left[tuple(prompt)].pop()]

        return super().converse(Together(engine), *others)


def test_answers_of_one_request_share_its_seed() -> None:
    assert run_check(CHECKS["conversation.seeds"], RequestPerPrompt(), "unused").status == "pass"


@pytest.mark.parametrize("limits", [{"max_tokens": 45}, {"max_new_tokens": 8}, {"max_turns": 2}])
def test_answers_are_those_that_the_engine_gave_where_the_code_asks_for_no_more_than_fits(
    limits: dict[str, Any],
) -> None:
    got = talk(ReferenceAdapter(), [3], n=2, **limits)
    assert got.answers == got.engine.answered
