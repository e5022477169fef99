"""The texts of the files that `rlcanary init` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from rlcanary.scaffold.functions import Function


@dataclass(frozen=True)
class FrameworkAdapter:
    """A bundled adapter to start from.

    Attributes:
        title: the framework's name.
        module: where the adapter's class is imported from.
        class_name: the adapter's class.
        settings: lines of code that give it the settings of a run; empty if it takes none.
    """

    title: str
    module: str
    class_name: str
    settings: tuple[str, ...] = ()


ADAPTERS = {
    "trl": FrameworkAdapter(
        "TRL",
        "rlcanary.adapters.trl",
        "TrlAdapter",
        (
            "def __init__(self, **settings):  # fields of GRPOConfig",
            '    super().__init__(**{"loss_type": "dr_grpo", "beta": 0.04, **settings})',
        ),
    ),
    "verl": FrameworkAdapter(
        "verl",
        "rlcanary.adapters.verl.adapter",
        "VerlAdapter",
        (
            "def __init__(self, actor=None, *others):  # fields of actor_rollout_ref.actor; next are those of algorithm",
            '    super().__init__({"clip_ratio_high": 0.28, **(actor or {})}, *others)',
        ),
    ),
    "skyrl": FrameworkAdapter(
        "SkyRL",
        "rlcanary.adapters.skyrl.adapter",
        "SkyrlAdapter",
        (
            "def __init__(self, settings=None):  # fields of trainer.algorithm",
            '    super().__init__({"eps_clip_high": 0.28, **(settings or {})})',
        ),
    ),
    "torchrl": FrameworkAdapter(
        "torchrl",
        "rlcanary.adapters.torchrl.adapter",
        "TorchrlAdapter",
        (
            "def __init__(self, loss=None, **others):  # arguments of GRPOLoss, of MCAdvantage",
            '    super().__init__({"clip_epsilon": 0.28, **(loss or {})}, **others)',
        ),
    ),
    "nemo_rl": FrameworkAdapter(
        "NeMo RL",
        "rlcanary.adapters.nemo_rl.adapter",
        "NemoRlAdapter",
        (
            "def __init__(self, loss=None, *others):  # fields of ClippedPGLossConfig; next are those of AdvEstimatorConfig",
            '    super().__init__({"ratio_clip_max": 0.28, **(loss or {})}, *others)',
        ),
    ),
    "openrlhf": FrameworkAdapter(
        "OpenRLHF",
        "rlcanary.adapters.openrlhf.adapter",
        "OpenrlhfAdapter",
        (
            "def __init__(self, settings=None):  # options of train_ppo_ray",
            '    super().__init__({"actor.dual_clip": 3.0, **(settings or {})})',
        ),
    ),
    "prime_rl": FrameworkAdapter("prime-rl", "rlcanary.adapters.prime_rl.adapter", "PrimeRlAdapter"),
}
"""The bundled adapters, by framework."""

FRAMEWORK_CANARY = '''\
"""How rlcanary calls this codebase: {title}'s own code under your settings, and your functions where you put them.

A method that is defined here takes the place of {title}'s. The docs of rlcanary list the methods (docs/adapters.md) and
what can be declared (docs/contract.md).
"""

from {module} import {class_name}


class Canary({class_name}):
    name = {name}
{settings}
    # Your own function in the place of {title}'s, for example a loss (from rlcanary import LossOutput):
    # def policy_loss(self, batch):
    #     return LossOutput(my_loss(batch.logprobs, batch.old_logprobs, batch.advantages, batch.mask))
'''

SETTINGS = """
    # The settings that your runs train with, which the checks hold the code to. {title}'s defaults without it.
{lines}
"""

WORKFLOW = """\
# Calls this repository's training code on small inputs and compares it with what the adapter declares, on a CPU.
name: rlcanary

on:
  pull_request:
  push:
    branches: [main, master]

permissions:
  contents: read

jobs:
  check:
    runs-on: ubuntu-latest
    timeout-minutes: 45
    env:
      OMP_NUM_THREADS: "1"
{defaults}    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "{python}"
      - run: pip install {install}
      - run: >-
          {command}
          --github --markdown "$GITHUB_STEP_SUMMARY"
"""

DEFAULTS = """\
    defaults:
      run:
        working-directory: {folder}
"""

PRE_COMMIT = """\
repos:
  - repo: local
    hooks:
{hook}"""

HOOK = """\
      - id: rlcanary
        name: rlcanary check
        entry: {entry}
        language: system
{files}        types: [python]
        pass_filenames: false
        stages: [pre-push]
"""

PYTEST_SETTINGS = """\

[tool.pytest.ini_options]
canary_expected = ["{expected}"]
"""


def first_adapter(
    class_name: str, name: str | None = None, functions: Mapping[str, Sequence[Function]] | None = None
) -> str:
    """Return the source of a runnable adapter, with textbook code where calls of one's own functions belong.

    Args:
        class_name: the adapter's class.
        name: the codebase's name in reports; None leaves that of the template.
        functions: the codebase's functions that a capability may call, by capability, for the text at the top.
    """
    source = files("rlcanary.adapters").joinpath("template.py").read_text(encoding="utf-8")
    source = re.sub(r"  # type: ignore.*", "", source).replace("MyCodebase", class_name)
    if name is not None:
        source = source.replace('"my-codebase"', json.dumps(name))
    if functions:
        lines = [f"    {name}: {', '.join(map(str, each))}" for name, each in functions.items()]
        told = "\n".join(["Functions found here whose names fit a capability:", *lines])
        source = source.replace('\n"""\n\nimport torch', f'\n\n{told}\n"""\n\nimport torch', 1)
    return source


def framework_adapter(framework: str, name: str) -> str:
    """Return the source of an adapter that starts from a bundled one."""
    base = ADAPTERS[framework]
    lines = "\n".join(f"    # {line}" for line in base.settings)
    settings = SETTINGS.format(title=base.title, lines=lines) if base.settings else ""
    return FRAMEWORK_CANARY.format(
        title=base.title, module=base.module, class_name=base.class_name, name=json.dumps(name), settings=settings
    )
