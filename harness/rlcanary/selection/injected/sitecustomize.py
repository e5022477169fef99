"""Python imports this at start-up in every process that inherits the PYTHONPATH of a recorded test run."""

import importlib.machinery
import importlib.util
import os
import sys


def run_hidden_sitecustomize(here: str) -> None:
    """The environment may have a sitecustomize of its own, which this one hides."""
    elsewhere = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def is_ray_service() -> bool:
    """Ray's own services inherit the variables and run no code of the project; its workers do."""
    return any("/ray/" in word and not word.endswith("/default_worker.py") for word in sys.orig_argv[1:4])


if __name__ == "sitecustomize":
    here = os.path.dirname(os.path.abspath(__file__))
    run_hidden_sitecustomize(here)
    try:
        if "RLCANARY_SELECTION" in os.environ and not is_ray_service():
            from rlcanary_recorder.process import start_in_child  # type: ignore[import-not-found]

            start_in_child()
    except Exception as error:  # noqa: BLE001 - a child must run as it would without a recorder; missing records are noticed
        print(f"rlcanary: this process is not recorded: {error!r}", file=sys.stderr)
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
