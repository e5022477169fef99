"""Constraints of IFEval: `rlcanary.grpo.rewards.ifeval`, under the names of IFEval and of RLVR-IFeval."""

from rlcanary.grpo.rewards.ifeval import IFEvalVerifier as Ours
from rlvr_experiments.verifiers import Judged


class IFEvalVerifier(Judged):
    """Checks the function that a problem names."""

    def __init__(self):
        super().__init__(Ours(), "ground_truth")


def _kept(response, constraint, **arguments):
    """Check one constraint of IFEval, named as there. One without its arguments, or with None for one, is not kept."""
    target = {"instruction_id_list": [constraint], "kwargs": [arguments]}
    return Ours().verify(response, target).value == 1.0


def validate_lowercase(response):
    return _kept(response, "change_case:english_lowercase")


def validate_uppercase(response):
    return _kept(response, "change_case:english_capital")


def validate_no_commas(response):
    return _kept(response, "punctuation:no_comma")


def validate_quotation(response):
    return _kept(response, "startend:quotation")


def verify_keyword_frequency(response, keyword=None, N=None):
    return _kept(response, "keywords:frequency", keyword=keyword, frequency=N, relation="at least")


def verify_keyword_existence(response, keyword_list=None):
    return _kept(response, "keywords:existence", keywords=keyword_list)


def verify_forbidden_words(response, forbidden_words=None):
    return _kept(response, "keywords:forbidden_words", forbidden_words=forbidden_words)


def verify_letter_frequency(response, letter=None, N=None):
    return _kept(response, "keywords:letter_frequency", letter=letter, let_frequency=N, let_relation="at least")


def verify_paragraph_count(response, N=None, section_splitter="***"):
    if section_splitter != "***":
        raise ValueError(f"section_splitter={section_splitter!r}: paragraphs are separated by ***")
    return _kept(response, "length_constraints:number_paragraphs", num_paragraphs=N)


def verify_sentence_count(response, N=None):
    return _kept(response, "length_constraints:number_sentences", num_sentences=N, relation="at least")


def verify_word_count(response, N=None, quantifier="at_least"):
    at_least = _kept(response, "length_constraints:number_words", num_words=N, relation="at least")
    at_most = _kept(response, "length_constraints:number_words", num_words=N + 1, relation="less than")
    return {"at_least": at_least, "at_most": at_most, "exactly": at_least and at_most}[quantifier]


def verify_bullet_points(response, N=None):
    return _kept(response, "detectable_format:number_bullet_lists", num_bullets=N)


def verify_end_phrase(response, end_phrase=None):
    return _kept(response, "startend:end_checker", end_phrase=end_phrase)


def verify_postscript(response, postscript_marker="P.S."):
    return _kept(response, "detectable_content:postscript", postscript_marker=postscript_marker)


def verify_json_format(response):
    return _kept(response, "detectable_format:json_format")


def verify_title_format(response):
    return _kept(response, "detectable_format:title")


def verify_placeholder(response, N=None):
    return _kept(response, "detectable_content:number_placeholders", num_placeholders=N)


def verify_two_responses(response):
    return _kept(response, "combination:two_responses")


def verify_highlighted_sections(response, N=None):
    return _kept(response, "detectable_format:number_highlighted_sections", num_highlights=N)


def verify_capitalized_words(response, N=None):
    return _kept(response, "change_case:capital_word_frequency", capital_frequency=N, capital_relation="at least")
