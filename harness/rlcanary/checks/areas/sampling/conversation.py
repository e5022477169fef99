"""Conversations: what the engine was given and what it sampled is what is trained on, over every turn."""

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from rlcanary.checks.asserts import assert_equal, assert_true, leave_out, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.conversations import (
    AnsweringEngine,
    ScriptedEnvironment,
    runs_of,
    spoken,
    talk,
    talks,
    talks_with_rewards,
    tasks_of,
    template_text,
    trained_runs,
    under,
    unlimited_talks,
)
from rlcanary.checks.worlds.scripted_engine import sampling_of
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.records.conversations import ConversationOptions
from rlcanary.contract.sampling import Sampling
from rlcanary.tiny_models import tiny_chat_tokenizer


@check("conversation.episodes_follow_tasks", needs=("converse",), cases=talks)
def episodes_follow_tasks(adapter: Adapter, turns: list[int], n: int, parallel: int, limits: dict[str, Any]) -> None:
    """A rollout returns n episodes per task, in the tasks' order and under their ids.

    Silent because an episode of another task is a valid one: its reward then counts in the wrong group, and the baseline
    is that of another prompt. Conversations end in any order. Look for lists that collect what is finished, and for prompts
    that are repeated n times where their environments or rewards are repeated another number of times.
    """
    got = talk(adapter, turns, n=n, parallel=parallel, **limits)
    identities = [[episode.task_id for episode in of_task] for of_task in got.episodes]
    assert_equal(identities, [[task.id] * n for task in got.tasks], "the episodes are not n of each task, in order")


@check("conversation.every_answer_once", needs=("converse",), cases=talks)
def every_answer_once(adapter: Adapter, turns: list[int], n: int, parallel: int, limits: dict[str, Any]) -> None:
    """The trained ids are those that the engine sampled, each answer once.

    Silent because the text is the same: an answer that is decoded and encoded again has other ids, without logprobs of
    their own, and the ratio explodes on a few tokens. Where each turn adds the whole conversation as a row, early turns
    are trained as often as there are later ones. Look for `apply_chat_template` over messages that the policy wrote, and
    for rows that are built per turn from all messages so far, and for a mask that is true on the environment's messages.
    """
    got = talk(adapter, turns, n=n, parallel=parallel, **limits)
    trained = sorted(run.ids for episode in got.flat for run in trained_runs(episode))
    sampled = sorted(list(each.completion.token_ids) for each in got.answers)
    told = f"{under(limits)}the {len(trained)} trained answers are not the {len(sampled)} that the engine sampled, once each"
    assert_equal(trained, sampled, told)


@check("conversation.context", needs=("converse",), cases=talks)
def context(adapter: Adapter, turns: list[int], n: int, parallel: int, limits: dict[str, Any]) -> None:
    """Every answer is trained behind the ids that the engine was given for it, token for token.

    Silent because the rows read well: with another header, an earlier answer encoded anew, a reply that was cut or a
    prompt without its tools the trainer scores each answer under another context than it was sampled in. Look for rows
    that are rendered at the end of a conversation although prompts were built turn by turn, or the other way round.
    """
    got = talk(adapter, turns, n=n, parallel=parallel, **limits)
    for episode in got.flat:
        for turn, run in enumerate(trained_runs(episode)):
            if given := [list(each.prompt) for each in got.answered_with(run.ids)]:
                told = (
                    f"answer {turn} of task {episode.task_id!r} is trained behind other ids than the engine was given"
                )
                expected = run.context if run.context in given else given[0]
                assert_equal(run.context, expected, told, quantity="ids before an answer")


@check("conversation.own_session", needs=("converse",), cases=talks)
def own_session(adapter: Adapter, turns: list[int], n: int, parallel: int, limits: dict[str, Any]) -> None:
    """Each conversation has a session of its own task's environment, which gets exactly its answers, in order.

    Silent because an environment answers anybody: with one state for several conversations a tool's result, a game's board
    or a reward belongs to another one. Look for one environment object per batch, for state in class attributes, and for
    `zip` of requests with environments that were repeated another number of times.
    """
    got = talk(adapter, turns, n=n, parallel=parallel, **limits)
    started = len(got.flat)
    for episode in got.flat:
        session, needed = got.session_of(episode), got.needs_telling(episode)
        if session is None and not needed:
            started -= 1
            continue
        told = f"of task {episode.task_id!r} the answers {spoken(episode)} are trained"
        assert_true(session is not None, f"{told}, which no session got", quantity="answers")
        assert session is not None
        expected = needed if session.answers == needed else spoken(episode)
        assert_equal(session.answers, expected, f"{told}; its session got others", quantity="answers")
        assert_equal(session.task_id, episode.task_id, f"{told}; its session is one of another task", quantity="task")
    found = len(got.environment.sessions)
    told = f"there were {found} sessions for {n * len(turns)} conversations"
    assert_true(started <= found <= n * len(turns), told, quantity="number of sessions")


@check("conversation.tasks_untouched", needs=("converse",))
def tasks_untouched(adapter: Adapter) -> None:
    """A conversation leaves its task as it was: the next one about it begins with the same prompt.

    Silent because the dataset's own list of messages grows with each episode: later ones begin with the turns of others.
    Look for `messages = item["messages"]` and `append`.
    """
    tasks = tasks_of(2)
    before, first_prompts = copy.deepcopy(tasks), []
    for _ in range(2):
        engine = AnsweringEngine()
        options = ConversationOptions(sampling_of(n=2))
        adapter.converse(engine, tiny_chat_tokenizer(), tasks, ScriptedEnvironment([2, 2]), options)
        prompts = {each.prompt for each in engine.answered}
        # Later ones hold answers, whose numbers follow the order in which conversations are had.
        later = {each for each in prompts for other in prompts - {each} if each[: len(other)] == other}
        first_prompts.append(sorted(prompts - later))
    assert_equal(tasks, before, "the messages of a task were changed", quantity="task")
    assert_equal(first_prompts[1], first_prompts[0], "the second rollout begins with other prompts", quantity="prompt")


@check("conversation.sampler_logprobs", needs=("converse",), cases=talks)
def sampler_logprobs(adapter: Adapter, turns: list[int], n: int, parallel: int, limits: dict[str, Any]) -> None:
    """Every trained id comes with the logprob that the engine reported for it.

    Silent because logprobs of other tokens are plausible: lists that are joined over turns shift by the length of a
    reply or of a header. Look for zeros that stand for inserted tokens in one list and are left out of another.
    """
    got = talk(adapter, turns, n=n, parallel=parallel, **limits)
    for episode in got.flat:
        for turn, run in enumerate(trained_runs(episode)):
            told = [list(each.completion.logprobs or ()) for each in got.answered_with(run.ids)]
            if told:
                message = f"the logprobs of answer {turn} of task {episode.task_id!r} are not the engine's"
                rounded = [round(logprob, 4) for logprob in run.logprobs]
                assert_equal(rounded, rounded if rounded in told else told[0], message, quantity="sampler logprobs")


def _talks_of_each_template() -> Iterator[Case]:
    yield from unlimited_talks()
    yield Case("replies of two messages in one turn", turns=[3, 1], n=1, parallel=2, merges_tools=True)


@check("conversation.prompts", needs=("converse",), cases=_talks_of_each_template)
def prompts(adapter: Adapter, turns: list[int], n: int, parallel: int, merges_tools: bool = False) -> None:
    """The engine's prompt in every turn is the conversation so far as the chat template writes it.

    Silent because a model answers any prompt: a header that is left from the turn before, a second system prompt, a reply
    under another role or a missing call's result only costs reward. Look for messages that are templated one by one, for
    generation prompts that stay when a tool's message follows, and for parallel calls of which one result is kept.
    """
    got = talk(adapter, turns, n=n, parallel=parallel, merges_tools=merges_tools)
    prompts_by_answer = {each.completion.text: list(each.prompt) for each in got.engine.answered}
    messages_of = {task.id: task.messages for task in got.tasks}
    for session in got.environment.sessions:
        so_far = list(messages_of[session.task_id])
        for answer, reply in zip(session.answers, session.replies, strict=True):
            if answer in prompts_by_answer:
                text = tiny_chat_tokenizer().decode(prompts_by_answer[answer])
                told = f"the prompt of the answer {answer!r} about task {session.task_id!r} is not the template's"
                assert_equal(text, template_text(so_far, merges_tools), told, quantity="prompt")
            so_far += [{"role": "assistant", "content": answer}, *reply.messages]


@check("conversation.history", severity="dashboard", needs=("converse",), cases=talks)
def history(adapter: Adapter, turns: list[int], n: int, parallel: int, limits: dict[str, Any]) -> None:
    """The history of an episode holds the task's messages, its answers and the replies, in order.

    Silent because people and reward models read a conversation that nobody had. Look for histories that are shared by
    conversations, and for replies that are added to a copy.
    """
    got = talk(adapter, turns, n=n, parallel=parallel, **limits)
    for episode in got.flat:
        session = got.session_of(episode)
        if session is None:
            continue
        if episode.messages is None:
            leave_out("no history is kept")
            continue
        possible = got.histories(episode, session)
        written = [(message["role"], message["content"]) for message in episode.messages]
        told = f"the history of a conversation about task {session.task_id!r} is another one"
        assert_equal(written, written if written in possible else possible[0], told)


@check("conversation.rewards", needs=("converse",), cases=talks_with_rewards)
def rewards(adapter: Adapter, turns: list[int], n: int, earns: bool, limits: dict[str, Any]) -> None:
    """The reward of an episode is the sum of what its session gave for its answers, whatever ended it.

    Silent because rewards are small numbers: that of the last turn alone, of the first, or of another conversation is a
    reward too. Look for a reward that is overwritten in the loop, for one that is read before the last reply, and for a test
    of the room that is left which also judges conversations that are over.
    """
    got = talk(adapter, turns, n=n, earns=earns, **limits)
    for episode in got.flat:
        session = got.session_of(episode)
        if session is None:
            continue
        given = [reply.reward for reply in session.replies]
        told = f"of a conversation about task {episode.task_id!r} with the rewards {given}"
        of_episode = round(float(episode.reward), 5)
        assert_equal(of_episode, sum(given), f"{under(limits)}the reward {told} is not their sum", quantity="reward")
        if episode.turn_rewards is not None:
            # An answer that the session did not get may have an entry.
            size = len(given) if len(given) < len(spoken(episode)) else None
            rounded = [round(float(reward), 5) for reward in episode.turn_rewards[:size]]
            assert_equal(
                rounded, given, f"{under(limits)}the rewards by turn {told} are others", quantity="rewards by turn"
            )


@check(
    "conversation.max_turns",
    needs=("converse",),
    cases=lambda: [Case(f"{most} turns", max_turns=most) for most in (1, 2, 4)],
)
def max_turns(adapter: Adapter, max_turns: int) -> None:
    """A conversation has at most `max_turns` answers, and no fewer while its environment goes on.

    Silent because one turn more or less only changes costs and rewards. Look for `limit or sys.maxsize`, under which
    an explicit 0 is no limit, for counters of calls that are compared with a limit of turns, and for `<=`.
    """
    got = talk(adapter, [6, 6], max_turns=max_turns)
    told = (
        f"two conversations, with max_turns={max_turns} and an environment that goes on, have another number of answers"
    )
    assert_equal(len(got.engine.answered), 2 * max_turns, told, quantity="number of answers")


@check(
    "conversation.max_tokens",
    needs=("converse",),
    # The first prompt has 12 ids, the second 49, the third 86; an answer may have 16.
    cases=lambda: [
        Case(f"{most} tokens", max_tokens=most, fewest=fewest)
        for most, fewest in ((12, 0), (16, 0), (44, 1), (52, 1), (75, 2), (100, 2))
    ],
)
def max_tokens(adapter: Adapter, max_tokens: int, fewest: int) -> None:
    """No row is longer than `max_tokens`, with its prompt, its answers and the replies, and none is left out at the limit.

    Silent because longer rows are cut somewhere behind: the trainer then scores answers without their end, or runs out
    of memory days later. Where rows that reach the limit are dropped, nothing teaches the policy to be shorter. Look for
    limits of one answer that are checked before a reply is added, for budgets that count sampled tokens alone, and for
    filters of full or truncated rows.
    """
    had = partial(talk, adapter, [6], parallel=2, max_tokens=max_tokens)
    got = had() if fewest else unless_raised(had)
    if got is None:
        return
    lengths = [len(row.prompt_ids) + len(row.completion.token_ids) for episode in got.flat for row in episode.rows]
    told = f"the rows have {lengths} ids; at most {max_tokens} are allowed"
    longest = max(lengths, default=0)
    assert_true(longest <= max_tokens, told, quantity="length of a row", magnitude=longest - max_tokens)
    sampled, trained = len(got.answers), sum(len(trained_runs(episode)) for episode in got.flat)
    told = f"with max_tokens={max_tokens} the engine sampled {sampled} answers, and the rows hold {trained}"
    assert_equal(trained, sampled, f"{told}: none may be left out", quantity="number of answers")
    told = f"max_tokens={max_tokens} has room for {fewest} answers of 16 ids, and {sampled} were sampled"
    assert_true(sampled >= fewest, told, quantity="number of answers", magnitude=fewest - sampled)
    for episode in (each for each in got.flat if not each.rows):
        told = f"max_tokens={max_tokens} has no room for an answer, and the reward is {episode.reward}, not NaN"
        assert_true(math.isnan(episode.reward), told, quantity="reward")


@check(
    "conversation.truncated_answer",
    needs=("converse",),
    # The engine's answers up to number 9 have nine ids, later ones ten.
    cases=lambda: [
        Case("all answers truncated", turns=[1, 1], n=1, limits={"max_new_tokens": 4}),
        Case("some answers truncated", turns=[1, 1], n=12, limits={"max_new_tokens": 9}),
        Case("one truncated by the end of its row", turns=[3], n=2, limits={"max_tokens": 45}),
        Case("one that just fits into its row", turns=[2], n=2, limits={"max_tokens": 46}),
    ],
)
def truncated_answer(adapter: Adapter, turns: list[int], n: int, limits: dict[str, Any]) -> None:
    """An answer that was cut at its limit is trained as it is, without an end of turn, and says that it was truncated.

    Silent because the template closes every turn: an end that was not sampled teaches the model to stop in the middle
    of a word. Look for the template's ids in place of the sampled ones, for a finish reason that is set to "stop" when a
    conversation ends, and for filters that drop such rows.
    """
    got = talk(adapter, turns, n=n, **limits)
    reasons = {tuple(each.completion.token_ids): each.completion.finish_reason for each in got.answers}
    trained = set()
    for episode in got.flat:
        for row in episode.rows:
            runs = [tuple(run.ids) for run in runs_of(row, episode.task_id)]
            trained.update(runs)
            for ids in runs:
                told = f"the answer with the ids {list(ids)} about task {episode.task_id!r} is not trained as it was sampled"
                assert_true(ids in reasons, told, quantity="ids of an answer")
            if runs:
                told = f"the answer with the ids {list(runs[-1])} about task {episode.task_id!r}"
                told = f"{told} is in a row with another finish reason"
                assert_equal(row.completion.finish_reason, reasons[runs[-1]], told, quantity="finish reason")
    for ids in (ids for ids, reason in reasons.items() if reason == "length"):
        told = f"{under(limits)}the answer with the ids {list(ids)} was cut, and no row holds it"
        assert_true(ids in trained, told, quantity="ids of an answer")


@check(
    "conversation.ends_at_a_truncated_answer",
    needs=("converse",),
    cases=lambda: [Case("the first truncated", n=1, limit=4), Case("a later one truncated", n=3, limit=9)],
)
def ends_at_a_truncated_answer(adapter: Adapter, n: int, limit: int) -> None:
    """Nothing is asked of the policy behind an answer that was cut at its limit.

    Silent because the template closes the turn and a tool answers half a call: the policy goes on from words that it did not
    mean to end with, and is trained on what follows. Look for a loop that asks the environment alone whether a conversation
    is over.
    """
    got = talk(adapter, [3, 4], n=n, max_new_tokens=limit)
    for cut in (each.completion for each in got.engine.answered if each.completion.finish_reason == "length"):
        size = len(cut.token_ids)
        behind = [
            each
            for each in got.engine.answered
            if any(list(each.prompt[at : at + size]) == cut.token_ids for at in range(len(each.prompt)))
        ]
        told = (
            f"behind the answer with the ids {cut.token_ids}, which was cut at {limit}, the policy was asked for more"
        )
        assert_true(not behind, told, quantity="answers", magnitude=len(behind))


@check("conversation.failing_environment", needs=("converse",))
def failing_environment(adapter: Adapter) -> None:
    """An environment that raises is loud, is told to the policy, or its episode has no reward; the others stay as they are.

    Silent because a reward of 0 looks like a wrong answer: the policy is punished for a broken tool. Look for `except`
    around the environment's reply.
    """
    # What raises without a failure is no answer to one.
    talk(adapter, [2, 2, 1])

    def had() -> object:
        return talk(adapter, [2, 2, 1], fails="b")

    got = unless_raised(had)
    if got is None:
        return
    decode = tiny_chat_tokenizer().decode
    is_told = any(str(got.environment.failure) in decode(each.prompt) for each in got.engine.answered)
    for episode in got.flat:
        if episode.task_id == "b":
            told = f"the environment of task 'b' raised, and its episode has the reward {episode.reward}"
            assert_true(is_told or not episode.rows or math.isnan(episode.reward), told, quantity="reward")
        else:
            session = got.session_of(episode)
            answers = None if session is None else session.answers
            assert_equal(spoken(episode), answers, "another task's episode is not what its session heard")


SAMPLINGS = ({"temperature": 0.7}, {"top_p": 0.5}, {"top_k": 5}, {"max_new_tokens": 24})


@check(
    "conversation.sampling_of_every_turn",
    needs=("converse",),
    cases=lambda: [Case(changes, options=changes) for changes in SAMPLINGS],
)
def sampling_of_every_turn(adapter: Adapter, options: dict[str, Any]) -> None:
    """Every turn is sampled with the run's parameters, not only the first.

    Silent because answers of another temperature or limit read the same; the importance ratio takes the blame. Look for
    parameters that are built anew for later turns, and for a limit that shrinks with each turn where `max_tokens` does not
    ask for it.
    """
    got = talk(adapter, [3], **options)
    ((name, wanted),) = options.items()
    told = f"{name} of the requests, turn by turn, is not what was asked for"
    found = [getattr(Sampling.of(each.sampling), name) for each in got.engine.answered]
    assert_equal(found, [wanted] * len(found), told, quantity=name)


@check("conversation.seeds", needs=("converse",))
def seeds(adapter: Adapter) -> None:
    """No two requests about a task have one seed: not those of its conversations, and not two turns of one.

    Silent because another prompt makes another text of the same random numbers. Conversations about one task under one
    seed are n times the same, whose advantages are all zero, and turns that share one are drawn as the first was. Look for
    the run's seed in every request, and for sampling parameters that are made once per conversation.
    """
    got = talk(adapter, [2], n=3, seed=7)
    seeded = [each.sampling for each in got.engine.answered if each.sampling.get("seed") is not None]
    if not seeded:
        leave_out("requests carry no seed")
        return
    # An answer of a request for n is one in n.
    requests = round(sum(1 / float(sampling.get("n", 1)) for sampling in seeded))
    told = "requests about one task are sampled under one seed: seeds that differ, of all"
    assert_equal(len({sampling["seed"] for sampling in seeded}), requests, told, quantity="number of different seeds")
