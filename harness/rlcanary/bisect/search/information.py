"""The expected information of a run about the identity of the culprit.

Shapes: C candidates to run, H positions of the culprit, Z = H + 1 hypotheses (the last one is that there is no culprit),
X scenarios, K kinds of reading.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from rlcanary.bisect.search.likelihood import Array

SCENARIOS = 16
"""The number of joint outcomes of the running probes that are considered."""


class Apart(NamedTuple):
    """The hypotheses besides a single culprit and none, taken together: the readings of a run of each candidate."""

    chance: float
    """The probability that one of them holds."""
    chances_CK: Array
    """The probability of each kind of reading, if one of them holds."""
    given_C: Array
    """The expected entropy, in bits, of a reading once it is known which."""


def information(
    belief_Z: Array,
    chances_H2K: Array,
    alike_K: Array,
    running: Sequence[int],
    again: Mapping[int, Array] = MappingProxyType({}),
    apart: Apart | None = None,
) -> Array:
    """Compute the expected information, in bits, of a run of each candidate.

    With other runs in progress, it is the information added to theirs: the mean over their joint outcomes.

    Args:
        belief_Z: The probability of each hypothesis.
        chances_H2K: The probability of each kind of reading, given the position and the good or bad side.
        alike_K: The same if every commit is alike.
        running: The candidates that run now.
        again: The probability of each kind of reading for one more run of a candidate that ran before, given the
            position [H, K]. The other candidates have `chances_H2K`.
        apart: Other hypotheses. `belief_Z` then holds what they leave.
    """
    if apart is None:
        apart = Apart(0.0, np.zeros((len(chances_H2K) - 1, len(alike_K))), np.zeros(len(chances_H2K) - 1))
    joint_XZ, apart_X = _scenarios(belief_Z, chances_H2K, alike_K, running, again, apart)
    weight_X = joint_XZ.sum(axis=1) + apart_X
    reading_XCK = _mixture(joint_XZ, chances_H2K, alike_K) + apart_X[:, None, None] * apart.chances_CK
    reading_XCK /= weight_X[:, None, None]
    surprise_C = weight_X @ entropy(reading_XCK)
    ambiguity_H21, ambiguity_1 = entropy(chances_H2K)[..., None], entropy(alike_K)[None]
    given_C = _mixture(joint_XZ.sum(axis=0)[None], ambiguity_H21, ambiguity_1)[0, :, 0]
    given_C += apart_X.sum() * apart.given_C
    for candidate, chances_HK in again.items():
        chances_ZK = np.concatenate([chances_HK, alike_K[None]])
        reading_XK = joint_XZ @ chances_ZK + apart_X[:, None] * apart.chances_CK[candidate]
        surprise_C[candidate] = weight_X @ entropy(reading_XK / weight_X[:, None])
        given_C[candidate] = joint_XZ.sum(axis=0) @ entropy(chances_ZK) + apart_X.sum() * apart.given_C[candidate]
    information_C: Array = np.maximum(surprise_C - given_C, 0.0)
    return information_C


def _scenarios(
    belief_Z: Array,
    chances_H2K: Array,
    alike_K: Array,
    running: Sequence[int],
    again: Mapping[int, Array],
    apart: Apart,
) -> tuple[Array, Array]:
    """Compute the joint probability of each hypothesis and each likely outcome of the running commits.

    The second array is that of the hypotheses `apart`.
    """
    joint_XZ, apart_X = belief_Z[None], np.array([apart.chance])
    if not running:
        return joint_XZ, apart_X
    # Only the side that a metric's value supports matters here.
    mean_2K = np.tensordot(belief_Z[:-1], chances_H2K, axes=1)
    speaks_bad_K = mean_2K[1] >= mean_2K[0]
    bad_H2 = chances_H2K @ speaks_bad_K
    place_H = np.arange(len(chances_H2K))
    for candidate in running:
        if candidate in again:
            bad_H = again[candidate] @ speaks_bad_K
        else:
            bad_H = np.where(candidate >= place_H, bad_H2[:, 1], bad_H2[:, 0])
        bad_Z = np.append(bad_H, alike_K @ speaks_bad_K)
        bad_apart = float(apart.chances_CK[candidate] @ speaks_bad_K)
        joint_XZ = np.concatenate([joint_XZ * bad_Z, joint_XZ * (1 - bad_Z)])
        apart_X = np.concatenate([apart_X * bad_apart, apart_X * (1 - bad_apart)])
        likeliest = np.argsort(-(joint_XZ.sum(axis=1) + apart_X), kind="stable")[:SCENARIOS]
        joint_XZ, apart_X = joint_XZ[likeliest], apart_X[likeliest]
    is_possible_X = joint_XZ.sum(axis=1) + apart_X > 0
    return joint_XZ[is_possible_X], apart_X[is_possible_X]


def entropy(chances: Array) -> Array:
    """Compute the entropy in bits over the last axis."""
    result: Array = -(chances * np.log2(np.maximum(chances, 1e-300))).sum(axis=-1)
    return result


def _mixture(weight_XZ: Array, values_H2K: Array, alike_K: Array) -> Array:
    """Sum the values of a run of each candidate over the weighted hypotheses, each on its good or bad side."""
    weight_XH1 = weight_XZ[:, :-1, None]
    bad_XCK = np.cumsum(weight_XH1 * values_H2K[:, 1], axis=1)[:, :-1]
    good_XHK = np.cumsum(weight_XH1 * values_H2K[:, 0], axis=1)
    result: Array = bad_XCK + good_XHK[:, -1:] - good_XHK[:, :-1] + weight_XZ[:, -1, None, None] * alike_K
    return result
