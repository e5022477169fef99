"""Python imports this at start-up in every process that inherits the PYTHONPATH of a recorded test run."""

import fcntl
import importlib.machinery
import importlib.util
import os
import sys

JOURNAL_DESCRIPTOR = 400
"""The recorder's."""
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


def ray_script() -> str | None:
    """Which of Ray's own scripts this process runs."""
    return next((word for word in sys.orig_argv[1:4] if "/ray/" in word), None)


def prepares_itself() -> bool:
    return any(name in word for word in (*os.environ, *sys.orig_argv) for name in PREPARATIONS)


def make_room() -> None:
    """For the journal's descriptor, a high one: once there are threads, the system takes ten milliseconds to make it."""
    low = os.open(os.devnull, os.O_RDONLY)
    try:
        os.close(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, JOURNAL_DESCRIPTOR))
    except OSError:  # the limit of open files is lower than that
        pass
    finally:
        os.close(low)


def record() -> None:
    """Ray's services inherit the variables and run no code of the project. Its workers do, but what they load brings the
    recorder along, so they start as fast as ever, unless they prepare themselves before."""
    script = ray_script()
    is_worker = script is not None and script.endswith("/default_worker.py")
    if script is None or (is_worker and prepares_itself()):
        from rlcanary_recorder.process import start_in_child  # type: ignore[import-not-found]

        start_in_child()
    elif is_worker:
        make_room()


if __name__ == "sitecustomize":
    here = os.path.dirname(os.path.abspath(__file__))
    run_hidden_sitecustomize(here)
    try:
        if "RLCANARY_SELECTION" in os.environ:
            record()
    except Exception as error:  # noqa: BLE001 - a child must run as it would without a recorder; missing records are noticed
        print(f"rlcanary: this process is not recorded: {error!r}", file=sys.stderr)
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
