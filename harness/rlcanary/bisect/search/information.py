"""The expected information of a run about the identity of the culprit.

Shapes: C candidates to run, H positions of the culprit, Z = H + 1 hypotheses (the last one is that there is no culprit),
X scenarios, K kinds of reading.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from rlcanary.bisect.search.likelihood import Array

SCENARIOS = 16
"""The number of joint outcomes of the running probes that are considered."""


def information(
    belief_Z: Array,
    chances_H2K: Array,
    alike_K: Array,
    running: Sequence[int],
    again: Mapping[int, Array] = MappingProxyType({}),
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
    """
    joint_XZ = _scenarios(belief_Z, chances_H2K, alike_K, running, again)
    weight_X = joint_XZ.sum(axis=1)
    reading_XCK = _mixture(joint_XZ, chances_H2K, alike_K) / weight_X[:, None, None]
    surprise_C = weight_X @ entropy(reading_XCK)
    ambiguity_H21, ambiguity_1 = entropy(chances_H2K)[..., None], entropy(alike_K)[None]
    given_C = _mixture(joint_XZ.sum(axis=0)[None], ambiguity_H21, ambiguity_1)[0, :, 0]
    for candidate, chances_HK in again.items():
        chances_ZK = np.concatenate([chances_HK, alike_K[None]])
        surprise_C[candidate] = weight_X @ entropy(joint_XZ @ chances_ZK / weight_X[:, None])
        given_C[candidate] = joint_XZ.sum(axis=0) @ entropy(chances_ZK)
    information_C: Array = np.maximum(surprise_C - given_C, 0.0)
    return information_C


def _scenarios(
    belief_Z: Array, chances_H2K: Array, alike_K: Array, running: Sequence[int], again: Mapping[int, Array]
) -> Array:
    """Compute the joint probability of each hypothesis and each likely outcome of the running commits."""
    joint_XZ = belief_Z[None]
    if not running:
        return joint_XZ
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
        joint_XZ = np.concatenate([joint_XZ * bad_Z, joint_XZ * (1 - bad_Z)])
        likeliest = np.argsort(-joint_XZ.sum(axis=1), kind="stable")[:SCENARIOS]
        joint_XZ = joint_XZ[likeliest]
    possible_XZ: Array = joint_XZ[joint_XZ.sum(axis=1) > 0]
    return possible_XZ


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
