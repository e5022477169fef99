"""Check constraints under the names and arguments of IFEval (2311.07911), strictly read.

The language of a response is not among them: it takes a model to tell.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
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


def _is_json(text: str) -> bool:
    bare = re.sub(r"^\s*```(?:json)?\s*\n|\n\s*```\s*$", "", text, flags=re.IGNORECASE)
    try:
        json.loads(bare)
    except ValueError:
        return False
    return True


def _has_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = _paragraphs(text, r"\n\n")
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    words = re.findall(r"\w+", paragraphs[nth_paragraph - 1])
    return bool(words) and words[0].lower() == first_word.lower()


def _words(text: str) -> int:
    return len(re.findall(r"\w+(?:['’-]\w+)*", text))  # noqa: RUF001


def _sentences(text: str) -> int:
    # Not behind an abbreviation such as Dr. or e.g.
    parts = re.split(r"(?<!\b[A-Z][a-z]\.)(?<!\b\w\.\w\.)(?<=[.!?])[\"')\]]*\s+", text.strip())
    return sum(bool(re.search(r"\w", part)) for part in parts)


def _highlights(text: str) -> int:
    return sum(bool(part.strip("* ")) for part in re.findall(r"\*\*[^\n*]*\*\*|\*[^\n*]+\*", text))


def _capital_words(text: str) -> int:
    return sum(word.isupper() for word in re.findall(r"\w+(?:['-]\w+)*", text))


def _are_two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


CONSTRAINTS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(_occurrences(word, text) for word in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: _compare(
        _occurrences(keyword, text), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(_occurrences(word, text) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _compare(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _compare(
        _sentences(text), relation, num_sentences
    ),
    "length_constraints:number_words": lambda text, num_words, relation: _compare(_words(text), relation, num_words),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: (
        len(_paragraphs(text, r"\s?\*\*\*\s?")) == num_paragraphs
    ),
    "length_constraints:nth_paragraph_first_word": _has_first_word,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": lambda text, postscript_marker: (
        re.search(rf"^\s*{re.escape(postscript_marker)}", text, re.MULTILINE | re.IGNORECASE) is not None
    ),
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(re.findall(r"^\s*(?:\*(?!\*)|-)\s*\S", text, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: (
        text.strip() in ("My answer is yes.", "My answer is no.", "My answer is maybe.")
    ),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: _highlights(text) >= num_highlights,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"^\s*{re.escape(section_spliter)}\s*\d+", text, re.MULTILINE)) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": lambda text: any(title.strip() for title in re.findall(r"<<([^\n<>]+)>>", text)),
    "combination:two_responses": _are_two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: _compare(
        _capital_words(text), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "punctuation:no_comma": lambda text: "," not in text,
}


def _quantity(count: int, bound: int, quantifier: str, tolerance: int) -> bool:
    """Compare as RLVR-IFeval does, where "around" is within a tolerance."""
    if quantifier not in ("at least", "at most", "around"):
        raise TypeError(f"quantifier {quantifier!r} is none of 'at least', 'at most' and 'around'")
    is_around = abs(count - bound) <= tolerance
    return {"at least": count >= bound, "at most": count <= bound, "around": is_around}[quantifier]


def _is(name: str, **spelled: str) -> Callable[..., bool]:
    """Return a constraint of IFEval, of arguments with other names."""
    return lambda text, **given: CONSTRAINTS[name](text, **{spelled.get(key, key): given[key] for key in given})


# The functions of RLVR-IFeval's targets (allenai/RLVR-IFeval); the language of a response is not among them.
FUNCTIONS: dict[str, Callable[..., bool]] = {
    # Here a keyword may be a part of a word.
    "verify_keywords": lambda text, keyword_list: all(word.lower() in text.lower() for word in keyword_list),
    "verify_keyword_frequency": lambda text, word, N: _occurrences(word, text) == N,
    "validate_forbidden_words": lambda text, forbidden_words: (
        not any(word.lower() in text.lower() for word in forbidden_words)
    ),
    "verify_letter_frequency": lambda text, letter, N: text.count(letter) == N,
    "verify_paragraph_count": lambda text, N: len(_paragraphs(text, r"\* \* \*")) == N,
    "validate_word_constraint": lambda text, N, quantifier: _quantity(
        len(text.split()), N, quantifier, max(round(N / 10), 1)
    ),
    "verify_sentence_constraint": lambda text, N, quantifier: _quantity(_sentences(text), N, quantifier, 1),
    "validate_paragraphs": lambda text, N, first_word, i: _has_first_word(text, N, i, first_word),
    "verify_postscript": lambda text, postscript_marker: bool(text.partition(postscript_marker)[2].strip()),
    "validate_placeholders": _is("detectable_content:number_placeholders", N="num_placeholders"),
    "verify_bullet_points": _is("detectable_format:number_bullet_lists", N="num_bullets"),
    "validate_title": _is("detectable_format:title"),
    "validate_choice": lambda text, options: text.strip() in options,
    "validate_highlighted_sections": _is("detectable_format:number_highlighted_sections", N="num_highlights"),
    "validate_sections": lambda text, N, section_splitter: len(_paragraphs(text, re.escape(section_splitter))) == N,
    "validate_json_format": _is("detectable_format:json_format"),
    "validate_repeat_prompt": _is("combination:repeat_prompt", original_prompt="prompt_to_repeat"),
    "validate_two_responses": _is("combination:two_responses"),
    "validate_uppercase": _is("change_case:english_capital"),
    "validate_lowercase": _is("change_case:english_lowercase"),
    "validate_frequency_capital_words": lambda text, N, quantifier: _quantity(_capital_words(text), N, quantifier, 0),
    "validate_end": lambda text, end_phrase: text.endswith(end_phrase),
    "validate_quotation": _is("startend:quotation"),
    "validate_no_commas": _is("punctuation:no_comma"),
}


class IFEvalVerifier:
    """Scores 1 if a completion keeps every constraint of its prompt, else 0; with `partial`, the share that it keeps."""

    bounds = (0.0, 1.0)

    def __init__(self, partial: bool = False) -> None:
        self.partial = partial

    def verify(self, completion: str, target: Any) -> Score:
        """Check the constraints of a target, as a mapping or as its JSON.

        It has `instruction_id_list` and `kwargs`, as in IFEval, or `func_name` and its arguments, as in RLVR-IFeval.

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
    known = CONSTRAINTS
    if isinstance(target, Mapping) and "func_name" in target:
        known, names = FUNCTIONS, [target["func_name"]]
        arguments: Sequence[Any] = [{key: value for key, value in target.items() if key != "func_name"}]
    elif isinstance(target, Mapping) and {"instruction_id_list", "kwargs"} <= set(target):
        names, arguments = target["instruction_id_list"], target["kwargs"]
    else:
        raise ValueError(f"a target has instruction_id_list and kwargs, or func_name, not {target!r}")
    if not names or len(names) != len(arguments):
        raise ValueError(f"{len(names)} constraints and {len(arguments)} sets of arguments")
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"no such constraint: {', '.join(unknown)}")
    checks = []
    for name, values in zip(names, arguments, strict=True):
        given = {key: value for key, value in (values or {}).items() if value is not None}
        inspect.signature(known[name]).bind("", **given)
        checks.append((known[name], given))
    return checks
