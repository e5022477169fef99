"""Parse numbers in the text of a completion, exactly."""

import re
from decimal import Decimal, InvalidOperation

NUMBER = re.compile(r"(?<![\w.])[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)|(?<![\w.])[-+]?\$?\.\d+(?!\w)")
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def numbers(text: str) -> list[Decimal]:
    """Find the numbers in a text, in order: "$1,234.50" is 1234.50, "x2" and "3rd" hold none.

    The minus sign of typesetting is a minus as well.
    """
    return [Decimal(re.sub(r"[$,]", "", match)) for match in NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))]


def number(text: object) -> Decimal | None:
    """Parse a text that is one number; None if it is not.

    Spaces, a currency or percent sign and a full stop are ignored.
    """
    bare = str(text).strip().rstrip("%.").replace("$", "").replace(",", "")
    try:
        value = Decimal(bare)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def tagged_answer(text: str) -> str | None:
    """Return the text between the last `<answer>` and its `</answer>`; None without such a pair."""
    answers = ANSWER_TAG.findall(text)
    return answers[-1].strip() if answers else None
