"""IFEval's constraints: each one kept by one text and broken by another; a broken target judges nothing."""

import json

import pytest

from rlcanary.grpo.rewards.ifeval import CONSTRAINTS, FUNCTIONS, IFEvalVerifier
from rlcanary.grpo.rewards.verifier import judge

# name, arguments, a text that keeps the constraint, a text that breaks it
CASES = [
    ("keywords:existence", {"keywords": ["sea", "sky"]}, "The Sea meets the sky", "Seaside sky"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "a cat, a dog", "a banana"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "less than"}, "a banana", "a cat, a dog"),
    ("keywords:forbidden_words", {"forbidden_words": ["no"]}, "I know", "No, I know"),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 3, "let_relation": "at least"}, "eEe", "ee"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two?", "One, two."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "don't stop", "do not stop"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First this.\n\n'Then' that.",
        "First this, then that.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [address]", "[name], []"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye\np.s. hello", "Bye, no P.S. here"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n**two**"),
    ("detectable_format:constrained_response", {}, "My answer is no.\n", "My answer is no"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and ****"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section one\nSection 2",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', '{"a": 1'),
    ("detectable_format:title", {}, "<<A poem>>\nroses", "<< >>\nroses"),
    ("combination:two_responses", {}, "yes ****** no", "yes ****** yes"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. It.", "It. Say it."),
    ("startend:end_checker", {"end_phrase": "The end."}, "It was the end. ", "The end. Or not?"),
    ("startend:quotation", {}, ' "quoted" ', '"'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NO WAY",
        "NO way",
    ),
    ("change_case:english_capital", {}, "ALL OF IT.", "ALL of IT."),
    ("change_case:english_lowercase", {}, "all of it.", "All of it."),
    ("punctuation:no_comma", {}, "one two", "one, two"),
]


# The same for the functions of RLVR-IFeval.
FUNCTION_CASES = [
    ("verify_keywords", {"keyword_list": ["sea", "sky"]}, "Seaside, the SKY", "The sea"),
    ("verify_keyword_frequency", {"word": "a", "N": 2}, "a cat, a dog", "a, a, a"),
    ("validate_forbidden_words", {"forbidden_words": ["No"]}, "I see", "I know"),
    ("verify_letter_frequency", {"letter": "e", "N": 2}, "eeE", "eee"),
    ("verify_paragraph_count", {"N": 2}, "one\n* * *\ntwo", "one\n***\ntwo"),
    ("validate_word_constraint", {"N": 3, "quantifier": "at most"}, "one two three", "one two three four"),
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "a " * 22, "a " * 23),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "at least"}, "One. Two?", "One, two."),
    ("verify_sentence_constraint", {"N": 30, "quantifier": "around"}, "One. " * 31, "One. " * 32),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "at least"}, "Look! See Dr. No.", "Ask Dr. No, e.g. now."),
    ("validate_paragraphs", {"N": 2, "first_word": "then", "i": 2}, "First.\n\nThen that.", "Then.\n\nFirst."),
    ("verify_postscript", {"postscript_marker": "P.S."}, "Bye. P.S. hello", "Bye\nP.S. "),
    ("validate_placeholders", {"N": 2}, "[name], [address]", "[name]"),
    ("verify_bullet_points", {"N": 2}, "* one\n- two", "* one"),
    ("validate_title", {}, "<<A poem>>\nroses", "roses"),
    ("validate_choice", {"options": ["yes", "no"]}, "yes", "yes or no"),
    ("validate_highlighted_sections", {"N": 2}, "*a* and *b*", "*a*"),
    ("validate_sections", {"N": 2, "section_splitter": "Part"}, "Part 1 a Part 2 b", "Part 1 a"),
    ("validate_json_format", {}, '{"a": 1}', '{"a": 1'),
    ("validate_repeat_prompt", {"original_prompt": "Say it."}, "Say it. It.", "It."),
    ("validate_two_responses", {}, "yes ****** no", "yes"),
    ("validate_uppercase", {}, "ALL OF IT.", "ALL of IT."),
    ("validate_lowercase", {}, "all of it.", "All of it."),
    ("validate_frequency_capital_words", {"N": 1, "quantifier": "at most"}, "NO way", "NO WAY"),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "around"}, "NO WAY", "NO way"),
    ("validate_end", {"end_phrase": "The end."}, "That was it. The end.", "That was the end."),
    ("validate_quotation", {}, ' "quoted" ', '"'),
    ("validate_no_commas", {}, "one two", "one, two"),
]


def target_of(*constraints):
    return {"instruction_id_list": [name for name, _ in constraints], "kwargs": [given for _, given in constraints]}


@pytest.mark.parametrize(("name", "arguments", "keeps", "breaks"), CASES, ids=[case[0] for case in CASES])
def test_constraint_tells_the_two_apart(name, arguments, keeps, breaks):
    target = target_of((name, arguments))
    assert judge(IFEvalVerifier(), keeps, target).value == 1.0
    assert judge(IFEvalVerifier(), breaks, target).value == 0.0


def test_every_constraint_has_a_case():
    assert {case[0] for case in CASES} == set(CONSTRAINTS)


def test_arguments_that_are_none_do_not_count_and_the_target_may_be_json():
    nones = {"num_words": None, "keywords": None}
    target = json.dumps(target_of(("punctuation:no_comma", nones), ("length_constraints:number_words", None)))
    assert judge(IFEvalVerifier(), "text", target).problem == "bad target"  # number_words lacks its arguments
    assert judge(IFEvalVerifier(), "text", json.dumps(target_of(("punctuation:no_comma", nones)))).value == 1.0


def test_partial_pays_the_share_that_is_kept():
    target = target_of(("punctuation:no_comma", {}), ("change_case:english_lowercase", {}))
    assert judge(IFEvalVerifier(partial=True), "one, two", target).value == 0.5
    assert judge(IFEvalVerifier(), "one, two", target).value == 0.0


@pytest.mark.parametrize("constraint", sorted(CONSTRAINTS))
def test_empty_completion_keeps_nothing(constraint):
    arguments = next(case[1] for case in CASES if case[0] == constraint)
    score = judge(IFEvalVerifier(partial=True), " \n", target_of((constraint, arguments)))
    assert (score.value, score.problem) == (0.0, "no answer")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("{not json", "Expecting property name"),
        ("[]", "instruction_id_list"),
        (None, "instruction_id_list"),
        ({"instruction_id_list": [], "kwargs": []}, "0 constraints"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "1 constraints and 0"),
        (target_of(("punctuation:no_colon", {})), "punctuation:no_colon"),
        (target_of(("punctuation:no_comma", {"surprise": 1})), "keyword argument 'surprise'"),
        (target_of(("keywords:existence", {})), "required argument: 'keywords'"),
        (target_of(("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": "about"})), "relation 'about'"),
    ],
)
def test_broken_target_is_no_wrong_answer(target, why):
    score = judge(IFEvalVerifier(), "text", target)
    assert (score.value, score.problem) == (None, "bad target")
    assert why in score.detail


@pytest.mark.parametrize(
    ("name", "arguments", "keeps", "breaks"), FUNCTION_CASES, ids=[case[0] for case in FUNCTION_CASES]
)
def test_functions_of_rlvr_tell_the_two_apart(name, arguments, keeps, breaks):
    # Each target of the dataset has every name, those that it does not use as null.
    everything = dict.fromkeys(("N", "quantifier", "keyword_list", "word", "letter", "options", "language"))
    target = json.dumps({"func_name": name, **everything, **arguments})
    assert judge(IFEvalVerifier(), keeps, target).value == 1.0
    assert judge(IFEvalVerifier(), breaks, target).value == 0.0


def test_every_function_of_rlvr_has_a_case():
    assert {case[0] for case in FUNCTION_CASES} == set(FUNCTIONS)


@pytest.mark.parametrize(
    "target",
    [
        {"func_name": "validate_response_language", "language": "en"},
        {"func_name": "verify_bullet_points"},
        {"func_name": "validate_word_constraint", "N": 3, "quantifier": "roughly"},
        {"func_name": "validate_no_commas", "commas": 3},
    ],
)
def test_functions_that_cannot_be_judged_give_no_reward(target):
    score = judge(IFEvalVerifier(), "text", target)
    assert (score.value, score.problem) == (None, "bad target")
