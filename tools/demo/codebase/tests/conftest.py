import pytest


@pytest.fixture
def keep(request):
    """Keeps a number of this test for the nightly history; without rlcanary's tracker it goes nowhere."""
    if request.config.pluginmanager.hasplugin("rlcanary-tracker"):
        return request.getfixturevalue("tracker").track
    return lambda name, value: None
