"""Run jobs on a Ray cluster, through the HTTP interface of its head node. Ray need not be installed here."""

import http.client
import json
import os
import shlex
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcanary.jobs.in_order import InOrder
from rlcanary.jobs.job import LOST, Cluster, Job, QueryFailed, Rejected, State, write_script

DASHBOARD = "http://127.0.0.1:8265"
"""The default address. Ray's own command reads the same variable for another one."""
STATES = {
    "PENDING": State("PENDING", False),
    "RUNNING": State("RUNNING", False),
    "STOPPED": State("CANCELLED", True),
    "SUCCEEDED": State("COMPLETED", True),
    "FAILED": State("FAILED", True),
}
"""Slurm's state for each Ray job status."""
BUSY = "No available agent to submit job"
"""Ray's message while the job agent of the head node is still starting."""
ATTEMPTS = 5
ANSWER_SECONDS = 60.0


class RayExecutor(InOrder):
    """Submits one Ray job per `Job`. Its script runs on the head node and requests resources from Ray.

    No GPUs are reserved for the job itself: its tasks and actors would then lack them.
    """

    name = "ray"
    slowest_poll = 10.0

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.address = self.address or os.environ.get("RAY_API_SERVER_ADDRESS") or DASHBOARD
        self._jobs = f"{self.address.rstrip('/')}/api/jobs/"

    def start(self, identity: str, job: Job) -> None:
        # The cluster has its own environment, and Ray's dashboard would show ours.
        own = {
            name: value
            for name, value in job.environment.items()
            if not name.startswith("RAY_") and name.isidentifier()
        }
        write_script(replace(job, variables={**own, **job.variables}))
        job.script.chmod(0o700)
        request = {"entrypoint": shlex.quote(str(job.script)), "submission_id": identity}
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._ask("", request)
            except QueryFailed as error:
                if attempt == ATTEMPTS or BUSY not in str(error):
                    raise Rejected(str(error)) from None
                time.sleep(min(2.0**attempt, 10.0))
            else:
                return

    def state(self, identity: str) -> State:
        answer = self._ask(identity)
        if answer is None:
            return State(LOST, True)
        status = str(answer.get("status"))
        if status not in STATES:
            raise QueryFailed(f"Ray reports an unknown state: {status}")
        return STATES[status]

    def end(self, identity: str) -> None:
        self._ask(f"{identity}/stop", {})

    def _ask(self, path: str, document: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Send a request to the head node. Returns None if it does not know the job."""
        body = None if document is None else json.dumps(document).encode()
        headers = {"Content-Type": "application/json", **authorization()}
        request = urllib.request.Request(self._jobs + path, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.NOT_FOUND and path:
                return None
            raise QueryFailed(f"{self._jobs}: {error.code} {error.read(500).decode(errors='replace')}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise QueryFailed(f"{self._jobs}: {error}") from None
        if not isinstance(answer, dict):
            raise QueryFailed(f"{self._jobs}: unexpected answer {answer!r}")
        return answer


def authorization() -> dict[str, str]:
    """Return the header for a cluster with token authentication.

    The token comes from the same places as for Ray's own commands.
    """
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if not token:
        file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        token = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    return {"Authorization": f"Bearer {token}"} if token else {}
