"""What `tracker.track` accepts, and what becomes of it in JSON."""

import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcanary.recording.encoding import MAX_ARRAY_ELEMENTS, EncodingError, NonFinite, encode


class Phase(enum.Enum):
    TRAIN = "train"


@dataclasses.dataclass
class Throughput:
    tokens_per_s: torch.Tensor
    phase: Phase


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (0.5, 0.5),
        ("text", "text"),
        (decimal.Decimal("0.25"), 0.25),
        (fractions.Fraction(1, 3), 1 / 3),
        (np.longdouble("0.25"), 0.25),
        (np.array([0.5, 0.25], dtype=np.longdouble), [0.5, 0.25]),
        (np.int64(2**60 + 1), 2**60 + 1),
        (torch.tensor(1.5), 1.5),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor(True), True),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
        (np.array([1.0, 2.0]), [1.0, 2.0]),
        (Path("a/b"), "a/b"),
        (datetime.date(2025, 3, 24), "2025-03-24"),
        (datetime.datetime(2025, 3, 24, 23, 34, 12, tzinfo=datetime.UTC), "2025-03-24T23:34:12+00:00"),
        (datetime.timedelta(minutes=1), 60.0),
        (Phase.TRAIN, "train"),
        (Throughput(torch.tensor(2.0), Phase.TRAIN), {"tokens_per_s": 2.0, "phase": "train"}),
        ({"nested": (1, torch.tensor(2))}, {"nested": [1, 2]}),
        ({1: "step"}, {"1": "step"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_value_encodes_as_plain_json(value: object, expected: object) -> None:
    encoded = encode(value)
    assert encoded.value == expected
    assert type(encoded.value) is type(expected)
    assert json.loads(json.dumps(encoded.value, allow_nan=False)) == expected
    assert encoded.nonfinite == []


def test_numbers_that_json_lacks_become_null_and_are_listed_with_their_place() -> None:
    encoded = encode({"loss": [1.0, float("nan")], "kl": torch.tensor(float("inf")), "reward": -np.inf})
    assert encoded.value == {"loss": [1.0, None], "kl": None, "reward": None}
    assert encoded.nonfinite == [
        NonFinite("['loss'][1]", "nan"),
        NonFinite("['kl']", "inf"),
        NonFinite("['reward']", "-inf"),
    ]


def _containing_itself() -> list[object]:
    loop: list[object] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "value is a object"),
        ({"a": [lambda: 0]}, r"\['a'\]\[0\] is a function"),
        (torch.zeros(MAX_ARRAY_ELEMENTS + 1), "1001 elements, at most 1000"),
        (torch.zeros(2, device="meta"), "without readable elements"),
        (1 + 2j, "complex"),
        (np.array([object()]), r"value at \[0\] is a object"),
        ({("a", 1): 0}, "keys must be str or int"),
        ({1: 0, "1": 0}, "one key in JSON"),
        (_containing_itself(), "nested more than 50 deep"),
        ({"a": [10**5000]}, r"\['a'\]\[0\] is .*14000 bits"),
        ({10**5000: 1}, "the value is .*14000 bits"),
    ],
    ids=[
        "object",
        "function",
        "large tensor",
        "meta tensor",
        "complex",
        "object array",
        "tuple key",
        "clashing keys",
        "loop",
        "5,001 digits",
        "key of 5,001 digits",
    ],
)
def test_value_without_json_form_is_refused_with_its_place(value: object, message: str) -> None:
    with pytest.raises(EncodingError, match=message):
        encode(value)


def test_encoding_imports_neither_torch_nor_numpy() -> None:
    program = """
import sys
from pathlib import Path
from rlcanary.recording.encoding import EncodingError, encode
encode([1, 0.5, Path("a")])
try:
    encode(object())
except EncodingError:
    print(sorted({"torch", "numpy", "jax"} & set(sys.modules)))
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


def test_keys_that_are_one_key_in_json_are_refused() -> None:
    class Colour(enum.Enum):
        RED = "red"

    with pytest.raises(EncodingError, match="keys that are one key in JSON"):
        encode({Colour.RED: 1, "red": 2})


def test_signalling_nan_is_a_nan() -> None:
    assert encode(decimal.Decimal("sNaN")) == (None, [("", "nan")])


@pytest.mark.parametrize("value", [decimal.Decimal("1e400"), fractions.Fraction(10**400, 3), np.longdouble("1e400")])
def test_finite_number_that_no_float_holds_is_refused_and_no_infinity(value: object) -> None:
    with pytest.raises(EncodingError, match="beyond the range of a float"):
        encode(value)
    assert encode(np.longdouble("-inf")).nonfinite == [NonFinite("", "-inf")]


@pytest.mark.parametrize("value", [1j, np.clongdouble(1j), np.array([1j])])
def test_complex_number_is_refused_as_such(value: object) -> None:
    with pytest.raises(EncodingError, match="is a complex number"):
        encode(value)
