"""Start the recorder: Python imports this module in each process that inherits a recorded run's PYTHONPATH."""

import fcntl
import importlib.machinery
import importlib.util
import os
import sys

JOURNAL_DESCRIPTOR = 400
"""The file descriptor of the recorder's journal."""
PREPARATIONS = ("WORKER_PROCESS_SETUP_HOOK", "--worker-preload-modules")
"""Names in a Ray worker's environment or arguments which mean that it runs code before its first task."""


def run_hidden_sitecustomize(here: str) -> None:
    """Run the environment's own sitecustomize, which this module hides."""
    elsewhere = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def ray_script() -> str | None:
    """Return the path of the Ray script that this process runs, if any."""
    return next((word for word in sys.orig_argv[1:4] if "/ray/" in word), None)


def prepares_itself() -> bool:
    return any(name in word for word in (*os.environ, *sys.orig_argv) for name in PREPARATIONS)


def make_room() -> None:
    """Grow the fd table for the journal's high descriptor: with threads running, that takes ten milliseconds."""
    low = os.open(os.devnull, os.O_RDONLY)
    try:
        os.close(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, JOURNAL_DESCRIPTOR))
    except OSError:  # the limit of open files is lower than that
        pass
    finally:
        os.close(low)


def record() -> None:
    """Start the recorder in processes that run code of the project.

    Ray's services inherit the variables but run no code of the project. In Ray's workers the recorder starts with the
    first pickled function, so that they start at full speed. Workers that run code before their first task start it
    here.
    """
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
