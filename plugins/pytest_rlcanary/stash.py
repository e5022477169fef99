"""Data that the plugins share through the stash of pytest's config."""

import pytest

from rlcanary.cleanup.belongings import Belongings

BELONGINGS = pytest.StashKey[Belongings]()

# Set by rlcanary-timeouts once a hung test is given up: nothing may wait for the main thread any more.
GIVEN_UP = pytest.StashKey[bool]()
REST_INPUT = "rlcanary_rest"
