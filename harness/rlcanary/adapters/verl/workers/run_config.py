"""The configuration of a run, composed of verl's own files."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any


@cache
def composed(name: str = "ppo_trainer") -> Any:
    """Compose the configuration of one of verl's trainers, as its command does."""
    import verl
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(Path(verl.__path__[0], "trainer", "config")), version_base=None):
        return compose(name)


def run_config(**sections: Mapping[str, Any]) -> Any:
    """Write settings into the configuration. The same settings give the same object, which stays as it is.

    Args:
        sections: settings by section; the dots of its name are two underscores.
    """
    return _written(json.dumps(sections))


@lru_cache(maxsize=64)
def _written(sections: str) -> Any:
    return new_config(**json.loads(sections))


def new_config(**sections: Mapping[str, Any]) -> Any:
    """Write settings into a configuration of its own, as `run_config` does."""
    from omegaconf import OmegaConf

    config = default_config()
    for name, settings in sections.items():
        for key, value in settings.items():
            OmegaConf.update(config, f"{name.replace('__', '.')}.{key}", value, merge=True)
    return config


def default_config() -> Any:
    """Return verl's composed configuration as a copy of the caller's own, faster than `deepcopy` makes one."""
    return pickle.loads(_pickled())


@cache
def _pickled() -> bytes:
    return pickle.dumps(composed())
