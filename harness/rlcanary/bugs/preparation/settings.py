"""Bugs between the configuration that is written and the one that is used."""

from collections.abc import Mapping
from typing import Any

import yaml

from rlcanary.bugs.museum import Bug
from rlcanary.contract.records.preparation import Setting


class OverridesParsedAgain(Bug):
    id = "skyrl.overrides-parsed-again"
    source = "SkyRL 8428c2557, #1962"
    effect = 'settings are printed and parsed as YAML: None becomes "None", and the text "1e5" a number'

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        used = dict(super().effective(written))
        texts = {name: str(value) for name, value in written.items() if value is None or isinstance(value, str)}
        return used | {name: yaml.safe_load(text) if text != "None" else text for name, text in texts.items()}


class ResumeNeverRead(Bug):
    id = "open-instruct.resume-never-read"
    source = "open-instruct e6c3044aa, #1823"
    effect = "an option to resume is declared and never read: training starts again from the base weights"

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**super().effective(written), "run.resume": super().effective({})["run.resume"]}


class RevisionNotPassedOn(Bug):
    id = "open-instruct.revision-not-passed-on"
    source = "open-instruct d60f516a1, #685"
    effect = "the template comes from the tokenizer's default revision, another than the pinned one"

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**super().effective(written), "tokenizer.revision": "main"}


class StopTextsOfTheRollout(Bug):
    id = "slime.stop-texts-of-the-rollout"
    source = "slime d3c0e79a7, #2242"
    effect = "an evaluation stops at the texts of the rollout, not at its own: its answers end elsewhere"

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        used = super().effective(written)
        return {**used, "evaluation.stop": list(used["sampling.stop"])}


class EvaluationLengthOfItsOwn(Bug):
    id = "skyrl.evaluation-length-of-its-own"
    source = "SkyRL 4e19c1f09, #1317"
    effect = "where only the length of training is set, evaluation keeps a default: its answers are truncated earlier"

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**super().effective(written), "evaluation.max_tokens": written.get("evaluation.max_tokens", 512)}


class DefaultInEachClass(Bug):
    id = "open-instruct.default-in-each-class"
    source = "open-instruct eeb67ce29, #1725, survey I39"
    effect = "the temperature has a default of 0.7 in each of two classes: to change the one leaves the other"

    def list_settings(self) -> list[Setting]:
        return [*super().list_settings(), Setting("loader.temperature", (0.6,), ("sampling.temperature",))]

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        own = {"sampling.temperature": 0.7, "loader.temperature": 0.7, **written}
        temperature = float(own.pop("loader.temperature"))
        return {**super().effective(own), "loader.temperature": temperature}


class OverrideReplacesAll(Bug):
    id = "verifiers.override-replaces-all"
    source = "verifiers 11cc860d6, #2226"
    effect = "an evaluation that writes one setting of its own loses all that it takes from training"

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        used, defaults = dict(super().effective(written)), super().effective({})
        taken = {"evaluation.max_tokens", "evaluation.stop"} - written.keys()
        if any(name.startswith("evaluation.") for name in written):
            used |= {name: defaults[name] for name in taken}
        return used
