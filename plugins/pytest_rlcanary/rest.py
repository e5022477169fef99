"""Run the rest of a session whose main thread is stuck, in a worker of pytest-xdist.

The session's own process becomes the controller, so that reports, results and the exit status are those of one session.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from xdist.dsession import DSession, Interrupted

from pytest_rlcanary.stash import REST_INPUT

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController


class RestOfSession(DSession):  # type: ignore[misc]
    """The controller of one worker, which is replaced as often as its tests take it along."""

    def __init__(self, session: pytest.Session, nodeids: Sequence[str]) -> None:
        option = session.config.option
        option.tx, option.dist = ["popen"], "load"
        super().__init__(session.config)
        self.session, self.nodeids = session, list(nodeids)
        self.countfailures = session.testsfailed

    def pytest_configure_node(self, node: WorkerController) -> None:
        node.workerinput[REST_INPUT] = self.nodeids

    def worker_collectionfinish(self, node: WorkerController, ids: Sequence[str]) -> None:
        collected = self.session.testscollected
        super().worker_collectionfinish(node, ids)
        self.session.testscollected = collected

    def run(self) -> None:
        """Run the tests, from a thread that is not the main thread."""
        # Python would run its handler in the main thread, which is stuck.
        ctypes.CDLL(None).signal(int(signal.SIGINT), None)
        self.config.pluginmanager.register(self, "dsession")
        self.pytest_sessionstart(self.session)
        try:
            self.pytest_runtestloop()
        except Interrupted as reason:  # --maxfail
            self.report_line(f"\n{reason}")
