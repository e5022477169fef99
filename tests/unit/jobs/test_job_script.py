"""The script of a job, run as a scheduler would."""

import os
import subprocess
from pathlib import Path

from waiting import HANG_S

from rlcanary.jobs.job import Job, read_result, write_script


def test_result_of_a_job_can_be_read_where_the_locale_writes_a_comma(tmp_path: Path) -> None:
    """The awk here stands for one in such a locale, which few machines have."""
    (tmp_path / "bin").mkdir()
    awk = tmp_path / "bin" / "awk"
    awk.write_text('#!/bin/sh\n[ "$LC_ALL" = C ] && printf 1.5 || printf 1,5\n')
    awk.chmod(0o755)
    environment = os.environ | {"PATH": f"{awk.parent}:{os.environ['PATH']}", "LC_ALL": "de_DE.UTF-8"}
    job = Job("a", ["true"], tmp_path, tmp_path / "job", tmp_path / "out", environment)
    write_script(job)
    subprocess.run([job.script], env=environment, check=True, timeout=HANG_S)
    result = read_result(job)
    assert result is not None
    assert result.seconds == 1.5
