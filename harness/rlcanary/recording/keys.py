"""The keys of tests in `metrics`."""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping


def plain_key(nodeid: str) -> str:
    """Returns a test's plain key: the module's stem, then the rest of the node id.

    `tests/unit/test_loss.py::TestClip::test_ratio[0.2]` -> `test_loss::TestClip::test_ratio[0.2]`.
    """
    path, separator, rest = nodeid.partition("::")  # only the path is free of "::", parameter ids may hold anything
    return f"{_stem(path)}{separator}{rest}"


@functools.cache  # a file has many tests
def _stem(path: str) -> str:
    name = path.rpartition("/")[2]
    return name.rpartition(".")[0] or name


def qualified_keys(nodeids: Iterable[str]) -> dict[str, str]:
    """Returns the keys of tests that would share a plain key with another: each uses its node id instead.

    Two folders may hold modules of one name. Both tests are renamed, so that a key never depends on which was
    collected first.
    """
    unique = dict.fromkeys(nodeids)
    files = {nodeid.partition("::")[0] for nodeid in unique}
    if len(set(map(plain_key, files))) == len(files):
        return {}
    counts = Counter(map(plain_key, unique))
    return {nodeid: nodeid for nodeid in unique if counts[plain_key(nodeid)] > 1}


def metric_key(nodeid: str, qualified: Mapping[str, str]) -> str:
    return qualified.get(nodeid) or plain_key(nodeid)
