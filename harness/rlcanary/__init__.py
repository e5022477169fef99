"""rlcanary catches RL-on-LLM training that runs without an error and learns the wrong thing."""

from importlib.metadata import version

__version__ = version("rlcanary")
