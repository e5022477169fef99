"""Copied as tests/conftest.py."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

import ray
from pkg.workers import Async, Counter, Lazy

from rlcanary.cleanup.ray_start import start_ray


@pytest.fixture(scope="session")
def cluster():
    start_ray(lambda: ray.init(num_cpus=4, include_dashboard=False, logging_level="error"))
    yield
    closing()
    ray.shutdown()


def closing():
    return 1


@pytest.fixture(scope="session")
def shared(cluster):
    counter = Counter.remote(start_value())
    ray.get(counter.quick.remote())
    return counter


@pytest.fixture(scope="session")
def shared_async(cluster):
    actor = Async.remote()
    ray.get(actor.__ray_ready__.remote())
    return actor


@pytest.fixture(scope="session")
def lazy(cluster):
    return Lazy.remote()


def start_value():
    return 10


@pytest.fixture(scope="module")
def prepared():
    return prepare()


def prepare():
    return [1]
