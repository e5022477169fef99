import pytest


def pytest_addoption(parser):
    parser.addoption("--train-seed", type=int, default=0, help="seed of the training runs, another one every night")


@pytest.fixture
def train_seed(request):
    return request.config.getoption("train_seed")


@pytest.fixture
def keep(request):
    """Keeps a number of this test for the nightly history; without rlcanary's tracker it goes nowhere."""
    if request.config.pluginmanager.hasplugin("rlcanary-tracker"):
        return request.getfixturevalue("tracker").track
    return lambda *_: None
