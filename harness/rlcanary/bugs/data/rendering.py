"""Bugs in chat templates and in the training mask of conversations."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from rlcanary.bugs.museum import Bug
from rlcanary.tiny_models import BOS_ID

Messages = list[Mapping[str, Any]]
Rendered = tuple[list[int], list[bool]]


def _marked(messages: Messages, trained: Sequence[bool]) -> Messages:
    return [{**message, "sampled": flag} for message, flag in zip(messages, trained, strict=True)]


class TwoBos(Bug):
    id = "nemo-rl.two-bos"
    source = "NeMo RL 7d5034e0b, #747, survey N09"
    effect = "the template has written a BOS and encoding adds another"

    def render(self, messages: Messages, tokenizer: Any, tools: Messages | None = None) -> Rendered:
        ids, trained = super().render(messages, tokenizer, tools)
        return [BOS_ID, *ids], [False, *trained]


class SystemPromptIgnored(Bug):
    id = "nemo-rl.system-prompt-dropped"
    source = "NeMo RL c3a2b612a, #2216, survey N34"
    effect = "training runs without the configured system prompt"

    def render(self, messages: Messages, tokenizer: Any, tools: Messages | None = None) -> Rendered:
        return super().render([message for message in messages if message["role"] != "system"], tokenizer, tools)


class SystemPromptNotPutIn(Bug):
    id = "rlvr.empty-system-prompt"
    source = "rlvr-experiments 7b60ce4, survey H09"
    effect = "the system prompt is stored, and an empty one is rendered"

    def render(self, messages: Messages, tokenizer: Any, tools: Messages | None = None) -> Rendered:
        kept = [{**message, "content": ""} if message["role"] == "system" else message for message in messages]
        return super().render(kept, tokenizer, tools)


class HistoryTrained(Bug):
    id = "nemo-rl.history-trained"
    source = "NeMo RL c3bb1d787, #2176, survey N14"
    effect = "assistant turns of the history are trained, with a ratio of exp(logprob - 0)"

    def render(self, messages: Messages, tokenizer: Any, tools: Messages | None = None) -> Rendered:
        return super().render(
            _marked(messages, [message["role"] == "assistant" for message in messages]), tokenizer, tools
        )


class SharedTurnsTrainedInEachBranch(Bug):
    id = "prime-rl.shared-turns-trained-twice"
    source = "prime-rl b453f40d8, #2975, survey P14"
    effect = "a turn that was sampled for another branch is trained here as well"

    def render(self, messages: Messages, tokenizer: Any, tools: Messages | None = None) -> Rendered:
        sampled = {message["content"] for message in messages if message.get("sampled")}
        trained = [message["role"] == "assistant" and message["content"] in sampled for message in messages]
        return super().render(_marked(messages, trained), tokenizer, tools)


class RenderedFromText(Bug):
    id = "trl.rendered-from-text"
    source = "TRL ebdfe826f, #5242, survey T28"
    effect = "each tool turn encodes the conversation again: the trained ids are not the sampled ones"

    def render(self, messages: Messages, tokenizer: Any, tools: Messages | None = None) -> Rendered:
        text: Messages = [{name: message[name] for name in message if name != "token_ids"} for message in messages]
        return super().render(text, tokenizer, tools)


class GenerationPromptLeftIn(Bug):
    id = "verl.generation-prompt-left-in"
    source = "verl 8fd671638, #2901, survey V32"
    effect = "an assistant header precedes every tool turn"

    def render(self, messages: Messages, tokenizer: Any, tools: Messages | None = None) -> Rendered:
        ids, trained = super().render(messages, tokenizer, tools)
        tool = tokenizer.encode("<|start|>tool", add_special_tokens=False)
        header = tokenizer.encode("<|start|>assistant\n", add_special_tokens=False)
        for place in reversed([place for place in range(len(ids)) if ids[place : place + len(tool)] == tool]):
            ids[place:place] = header
            trained[place:place] = [False] * len(header)
        return ids, trained


class ToolBranchNeverTaken(Bug):
    id = "verl.tool-branch-never-taken"
    source = "verl a47eac540, #3865, survey V49"
    effect = "a parser object is compared with its name: tool answers are formatted as user turns"

    def render(self, messages: Messages, tokenizer: Any, tools: Messages | None = None) -> Rendered:
        generic = [{**message, "role": "user"} if message["role"] == "tool" else message for message in messages]
        return super().render(generic, tokenizer, tools)


class ToolAnswerMissing(Bug):
    id = "torchrl.tool-answer-missing"
    source = "torchrl 5a40c0b82, #3087, survey R11"
    effect = "the tool's answer is read from a field that does not exist"

    def render(self, messages: Messages, tokenizer: Any, tools: Messages | None = None) -> Rendered:
        read = [
            {**message, "content": message.get("tool_response", "")} if message["role"] == "tool" else message
            for message in messages
        ]
        return super().render(read, tokenizer, tools)


class CutBeforeThePrefixIsFinal(Bug):
    id = "trl.first-token-cut"
    source = "TRL 18f187db1, #6433, survey T46"
    effect = "the first tokens of a completion vanish"

    def render(self, messages: Messages, tokenizer: Any, tools: Messages | None = None) -> Rendered:
        ids, trained = super().render(messages, tokenizer, tools)
        first = trained.index(True) if True in trained else len(ids)
        return ids[:first] + ids[first + 1 :], trained[:first] + trained[first + 1 :]


class EachMessageTemplatedAlone(Bug):
    id = "skyrl.each-message-templated-alone"
    source = "SkyRL 5c98a6a12, #404"
    effect = "each turn is written as a conversation of its own, with what the template puts before the first"

    def render(self, messages: Messages, tokenizer: Any, tools: Messages | None = None) -> Rendered:
        ids, trained = super().render(messages, tokenizer, tools)
        (start,) = tokenizer.encode("<|start|>", add_special_tokens=False)
        for place in reversed([place for place, token in enumerate(ids) if token == start][1:]):
            ids[place:place] = [BOS_ID]
            trained[place:place] = [False]
        return ids, trained


class EachToolAnswerTemplatedAlone(Bug):
    id = "slime.each-tool-answer-templated-alone"
    source = "slime f033ebfc0, #2264"
    effect = "the answers of several tools, which the template writes as one turn, become a turn each"

    def render(self, messages: Messages, tokenizer: Any, tools: Messages | None = None) -> Rendered:
        apart: Messages = []
        for message in messages:
            if message["role"] == "tool" and apart and apart[-1]["role"] == "tool":
                apart.append({"role": "user", "content": "-"})
            apart.append(message)
        ids, trained = super().render(apart, tokenizer, tools)
        between = tokenizer.encode("<|start|>user\n-<|end|>\n", add_special_tokens=False)
        for place in reversed(range(len(ids))):
            if ids[place : place + len(between)] == between:
                del ids[place : place + len(between)], trained[place : place + len(between)]
        return ids, trained


class LastRoundBeginsAtTheUser(Bug):
    id = "ms-swift.last-round-begins-at-the-user"
    source = "ms-swift cf6316ca2, #9923"
    effect = "turns of the history are trained where a tool's message stands between them and the sampled one"

    def render(self, messages: Messages, tokenizer: Any, tools: Messages | None = None) -> Rendered:
        user = max((index for index, each in enumerate(messages) if each["role"] == "user"), default=-1)
        trained = [
            bool(each.get("sampled"))
            or (
                each["role"] == "assistant" and any(later.get("sampled") for later in messages[index:]) and index > user
            )
            for index, each in enumerate(messages)
        ]
        return super().render(_marked(messages, trained), tokenizer, tools)


class ContentsNotTrimmed(Bug):
    id = "tinker-cookbook.contents-not-trimmed"
    source = "tinker-cookbook 6f4d702f, #852"
    effect = "contents are written as they are, which the template of the model trims"

    def render(self, messages: Messages, tokenizer: Any, tools: Messages | None = None) -> Rendered:
        own = copy.deepcopy(tokenizer)
        own.chat_template = tokenizer.chat_template.replace(" | trim", "")
        return super().render(messages, own, tools)


class ThoughtsWithoutTheirOpening(Bug):
    id = "trl.thoughts-without-their-opening"
    source = "TRL 63b7c3f54, #6363"
    effect = "an empty thought is written before the thoughts of a turn whose opening tag stood in the prompt"

    def render(self, messages: Messages, tokenizer: Any, tools: Messages | None = None) -> Rendered:
        if "</think>" in tokenizer.chat_template:
            messages = [
                {**each, "content": "<think>\n\n</think>\n\n" + each["content"]}
                if "</think>" in each["content"] and "<think>" not in each["content"]
                else each
                for each in messages
            ]
        return super().render(messages, tokenizer, tools)
