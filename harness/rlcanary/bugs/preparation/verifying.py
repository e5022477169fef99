"""Bugs in verifiers."""

import re
from dataclasses import replace

from rlcanary.bugs.museum import Bug
from rlcanary.contract.records.preparation import Answer


class OptionSearchedForTheAnswer(Bug):
    id = "open-instruct.option-searched-for-the-answer"
    source = "open-instruct a09e14928, #1683"
    effect = "the completion is searched in the option: nearly every choice is wrong, and an empty completion right"

    def verify(self, answer: Answer) -> bool:
        return answer.text in answer.reference if answer.kind == "choice" else super().verify(answer)


class LastPartDecides(Bug):
    id = "open-instruct.last-part-decides"
    source = "open-instruct ebca9f7d4, #1044"
    effect = "of an answer in several parts only the last is compared: the others may be wrong"

    def verify(self, answer: Answer) -> bool:
        parts = answer.reference.split(",")
        text = re.sub(r"\([^()]*, ([^()]*)\)", r"\1", answer.text)
        return super().verify(replace(answer, text=text, reference=parts[-1].strip(" )")))
