"""Python imports this at start-up in every process that inherits the PYTHONPATH of a recorded test run."""

import importlib.machinery
import importlib.util
import os
import sys

PREPARATIONS = ("WORKER_PROCESS_SETUP_HOOK", "--worker-preload-modules")
"""Parts of what a worker of Ray is told with, where it is to run something before its first task."""


def run_hidden_sitecustomize(here: str) -> None:
    """The environment may have a sitecustomize of its own, which this one hides."""
    elsewhere = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def runs_project_code() -> bool:
    """Whether what this process runs may be the project's, from its start on.

    Ray's services inherit the variables and run no such code. Its workers do, but what they load brings the recorder along,
    so they start as fast as ever, unless they prepare themselves before.
    """
    script = next((word for word in sys.orig_argv[1:4] if "/ray/" in word), None)
    if script is None:
        return True
    prepares = any(name in word for word in (*os.environ, *sys.orig_argv) for name in PREPARATIONS)
    return script.endswith("/default_worker.py") and prepares


if __name__ == "sitecustomize":
    here = os.path.dirname(os.path.abspath(__file__))
    run_hidden_sitecustomize(here)
    try:
        if "RLCANARY_SELECTION" in os.environ and runs_project_code():
            from rlcanary_recorder.process import start_in_child  # type: ignore[import-not-found]

            start_in_child()
    except Exception as error:  # noqa: BLE001 - a child must run as it would without a recorder; missing records are noticed
        print(f"rlcanary: this process is not recorded: {error!r}", file=sys.stderr)
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
