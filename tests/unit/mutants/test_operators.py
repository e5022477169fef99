"""Mutation operators make the small mistakes that shipped bugs are made of, and nothing that only changes text."""

import ast

import pytest

from rlcanary.mutants.operators import mutations


def mistakes(source: str, signature: str = "x, y, mask") -> set[str]:
    indented = "\n".join(f"    {line}" for line in source.splitlines())
    (function,) = ast.parse(f"def f({signature}):\n{indented}\n").body
    assert isinstance(function, ast.FunctionDef)
    original = ast.unparse(function)
    found = {mutation.after for mutation in mutations(function)}
    assert ast.unparse(function) == original
    return found


@pytest.mark.parametrize(
    ("source", "mistake"),
    [
        ("return x + y", "return x - y"),
        ("return x < y", "return x <= y"),
        ("return x < y", "return x >= y"),
        ("return -x", "return x"),
        ("return x and y", "return x or y"),
        ("return x and y", "return y"),
        ("return x + 1", "return x + 2"),
        ("return x * 0.5", "return x * 1.0"),
        ("return x.sum(dim=1)", "return x.sum(dim=0)"),
        ("return x.sum(dim=-1)", "return x.sum(dim=0)"),
        ("return x.sum(dim=1)", "return x.sum()"),
        ("return x.std(correction=1)", "return x.std(correction=0)"),
        ("return x.sum(keepdim=True)", "return x.sum(keepdim=False)"),
        ("return x.sum()", "return x.mean()"),
        ("return x[:-1]", "return x[:0]"),
        ("return x[1:]", "return x[0:]"),
        ("return x[1:]", "return x[:1]"),
        ("return x[:y]", "return x[:]"),
        ("return x.clamp(max=y)", "return x"),
        ("return torch.where(mask, x, y)", "return x"),
        ("return torch.where(mask, x, y)", "return torch.where(mask, y, x)"),
        ("return x if y else mask", "return mask"),
        ("if y:\n    return x", "if True:"),
        ("if y:\n    return x", "if False:"),
        ("x = x / y\nreturn x", "pass"),
        ("x += y\nreturn x", "pass"),
        ("x.zero_grad()", "pass"),
        ("with torch.no_grad():\n    return x", "if True:"),
        ("return x.detach()", "return x"),
        ("loss = x * y\nreturn loss", "loss = (x * y).detach()"),
        ("return x.double().sum()", "return x.float().sum()"),
        ("return torch.zeros(3, dtype=torch.float32)", "return torch.zeros(3, dtype=torch.bfloat16)"),
        ("logprobs = x\nreturn logprobs.sum()", "return logprobs.bfloat16().sum()"),
        ("return f(x, y)", "return f(y, x)"),
        ("return f(x, y)", "return f(x)"),
        ("return f(x, scale=y)", "return f(x)"),
        ("return x.old_logprobs", "return x.sampler_logprobs"),
        ("return x.completion_mask", "return x.attention_mask"),
    ],
)
def test_mistake_is_made(source: str, mistake: str) -> None:
    assert mistake in mistakes(source)


def test_values_of_one_kind_are_swapped_only_where_both_exist() -> None:
    assert mistakes("return logprobs_BT", "logprobs_BT, ref_logprobs_BT") == {"return ref_logprobs_BT"}


@pytest.mark.parametrize(
    "source",
    [
        "if x < 0:\n    raise ValueError(f'{x + 1} is negative')",
        "assert x < 0",
        "logger.info('%d', x + 1)",
        "if x < 0:\n    own_logger.info('%d', x + 1)",
        "if x < 0:\n    _warn_once(x + 1)\nelse:\n    raise ValueError(x)",
        "'''Docstring.'''",
        "return 'text'",
        "return f'{x + 1}'",
        "return zip(x, strict=True)",
        "y: int = x",
    ],
)
def test_guards_and_text_are_left_alone(source: str) -> None:
    assert mistakes(source) == set()


def test_a_mistake_is_felt_where_it_is_or_in_the_branch_that_it_leaves_out() -> None:
    source = "def f(x):\n    if x < 0 or x > 9:\n        return x + 1\n    return x if x else 3\n"
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    felt = {each.after: [ast.get_source_segment(source, node) for node in each.felt] for each in mutations(function)}
    assert felt["if False:"] == ["return x + 1"]
    assert felt["if x < 0:"] == ["x > 9"]
    assert felt["if x < 0 and x > 9:"] == ["x < 0 or x > 9"]
    assert felt["if x <= 0 or x > 9:"] == ["x < 0"]
    assert felt["return x"] == ["3"]
    assert felt["return 3"] == ["x"]
    assert felt["return x if x else 4"] == ["3"]
