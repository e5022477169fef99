"""Check constraints under the names and arguments of IFEval (2311.07911), strictly read.

The language of a response is not among them: it takes a model to tell.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlcanary.grpo.rewards.verifier import Score


def _compare(count: int, relation: str, bound: int) -> bool:
    if relation not in ("at least", "less than"):
        raise TypeError(f"relation {relation!r} is neither 'at least' nor 'less than'")
    return count >= bound if relation == "at least" else count < bound


def _occurrences(keyword: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(keyword)}(?!\w)", text, re.IGNORECASE))


def _paragraphs(text: str, separator: str) -> list[str]:
    return [part.strip() for part in re.split(separator, text) if part.strip()]


def has_keywords(text: str, keywords: list[str]) -> bool:
    return all(_occurrences(keyword, text) for keyword in keywords)


def has_keyword_often(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(_occurrences(keyword, text), relation, frequency)


def has_no_forbidden_word(text: str, forbidden_words: list[str]) -> bool:
    return not any(_occurrences(word, text) for word in forbidden_words)


def has_letter_often(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def has_sentences(text: str, num_sentences: int, relation: str) -> bool:
    sentences = [part for part in re.split(r"(?<=[.!?])[\"')\]]*\s+", text.strip()) if re.search(r"\w", part)]
    return _compare(len(sentences), relation, num_sentences)


def has_words(text: str, num_words: int, relation: str) -> bool:
    return _compare(len(re.findall(r"\w+(?:['’-]\w+)*", text)), relation, num_words)  # noqa: RUF001


def has_divided_paragraphs(text: str, num_paragraphs: int) -> bool:
    return len(_paragraphs(text, r"\s?\*\*\*\s?")) == num_paragraphs


def has_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = _paragraphs(text, r"\n\n")
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    words = re.findall(r"\w+", paragraphs[nth_paragraph - 1])
    return bool(words) and words[0].lower() == first_word.lower()


def has_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders


def has_postscript(text: str, postscript_marker: str) -> bool:
    return re.search(rf"^\s*{re.escape(postscript_marker)}", text, re.MULTILINE | re.IGNORECASE) is not None


def has_bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^\s*(?:\*(?!\*)|-)\s*\S", text, re.MULTILINE)) == num_bullets


def is_one_of_the_options(text: str) -> bool:
    return text.strip() in ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def has_highlights(text: str, num_highlights: int) -> bool:
    highlighted = re.findall(r"\*\*[^\n*]*\*\*|\*[^\n*]+\*", text)
    return sum(bool(part.strip("* ")) for part in highlighted) >= num_highlights


def has_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"^\s*{re.escape(section_spliter)}\s*\d+", text, re.MULTILINE)) >= num_sections


def is_json(text: str) -> bool:
    bare = re.sub(r"^\s*```(?:json)?\s*\n|\n\s*```\s*$", "", text, flags=re.IGNORECASE)
    try:
        json.loads(bare)
    except ValueError:
        return False
    return True


def has_title(text: str) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^\n<>]+)>>", text))


def is_two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def is_quoted(text: str) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


def has_capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    capital = [word for word in re.findall(r"\w+(?:['-]\w+)*", text) if word.isupper()]
    return _compare(len(capital), capital_relation, capital_frequency)


CONSTRAINTS: dict[str, Callable[..., bool]] = {
    "keywords:existence": has_keywords,
    "keywords:frequency": has_keyword_often,
    "keywords:forbidden_words": has_no_forbidden_word,
    "keywords:letter_frequency": has_letter_often,
    "length_constraints:number_sentences": has_sentences,
    "length_constraints:number_words": has_words,
    "length_constraints:number_paragraphs": has_divided_paragraphs,
    "length_constraints:nth_paragraph_first_word": has_first_word,
    "detectable_content:number_placeholders": has_placeholders,
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": has_bullets,
    "detectable_format:constrained_response": is_one_of_the_options,
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:multiple_sections": has_sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": has_title,
    "combination:two_responses": is_two_responses,
    "combination:repeat_prompt": repeats_prompt,
    "startend:end_checker": ends_with,
    "startend:quotation": is_quoted,
    "change_case:capital_word_frequency": has_capital_words,
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "punctuation:no_comma": lambda text: "," not in text,
}


class IFEvalVerifier:
    """Scores 1 if a completion keeps every constraint of its prompt, else 0; with `partial`, the share that it keeps."""

    bounds = (0.0, 1.0)

    def __init__(self, partial: bool = False) -> None:
        self.partial = partial

    def verify(self, completion: str, target: Any) -> Score:
        """Check the constraints of a target with `instruction_id_list` and `kwargs`, as a mapping or as its JSON.

        Arguments that are None do not count, since the dataset writes every name for every constraint. Of a target with a
        constraint that is not known, or lacks an argument, nothing is judged.
        """
        try:
            checks = _checks(json.loads(target) if isinstance(target, str) else target)
            if not completion.strip():
                return Score(0.0, "no answer")
            kept = [constraint(completion, **arguments) for constraint, arguments in checks]
        except (ValueError, TypeError) as error:
            return Score(None, "bad target", detail=str(error))
        return Score(sum(kept) / len(kept) if self.partial else float(all(kept)))


def _checks(target: Mapping[str, Any]) -> list[tuple[Callable[..., bool], dict[str, Any]]]:
    if not isinstance(target, Mapping) or not {"instruction_id_list", "kwargs"} <= set(target):
        raise ValueError(f"a target has instruction_id_list and kwargs, not {target!r}")
    names, arguments = target["instruction_id_list"], target["kwargs"]
    if not names or len(names) != len(arguments):
        raise ValueError(f"{len(names)} constraints and {len(arguments)} sets of arguments")
    unknown = sorted(set(names) - set(CONSTRAINTS))
    if unknown:
        raise ValueError(f"no such constraint: {', '.join(unknown)}")
    checks = []
    for name, values in zip(names, arguments, strict=True):
        given = {key: value for key, value in (values or {}).items() if value is not None}
        inspect.signature(CONSTRAINTS[name]).bind("", **given)
        checks.append((CONSTRAINTS[name], given))
    return checks
