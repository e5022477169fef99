import os

from inner_session import WITHOUT_FOREIGN

# Ray gives its workers niceness 15: beside busy tests they hardly run, and the limits of their own tests pass.
os.environ |= {"RAY_worker_niceness": "0"}
# Workers of xdist are given 80 columns: what a test reads of a report should not be cut or wrapped.
os.environ.pop("COLUMNS", None)

pytest_plugins = ["pytester"]


def pytest_configure(config):
    # For the sessions that tests start, not for the workers of this one.
    if hasattr(config, "workerinput") or not config.getoption("numprocesses"):
        os.environ["PYTEST_ADDOPTS"] = " ".join(WITHOUT_FOREIGN)
