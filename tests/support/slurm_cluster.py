"""A real Slurm on this machine, in a folder of its own: munged, slurmctld and slurmd, ended by process id."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from waiting import HANG_S

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")

CONFIGURATION = """
ClusterName=canary
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=10000
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=2
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 Port={daemon_port} CPUs={cores} State=UNKNOWN
NodeName=second NodeHostname={host} NodeAddr=127.0.0.1 Port={second_port} CPUs={cores} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes={host} MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=wide Nodes={host},second MaxTime=INFINITE State=UP PriorityTier=1
"""


def missing_programs() -> list[str]:
    """What Debian's slurm-wlm and munge would bring and is not here."""
    return [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]


def search_path() -> str:
    return f"{os.environ['PATH']}{os.pathsep}/usr/sbin{os.pathsep}/sbin"


@contextmanager
def slurm_cluster(cores: int = 4) -> Iterator[dict[str, str]]:
    """Start a cluster of two nodes, whose cores are counted as `cores` whatever the machine has; yields the environment
    in which `sbatch`, `squeue`, `scontrol` and `scancel` speak to it. Its partitions `test` and `urgent`, which preempts,
    have one node, `wide` has both.
    """
    with tempfile.TemporaryDirectory(prefix="rlcanary-slurm-") as name, ExitStack() as daemons:
        folder = Path(name)
        folder.chmod(0o755)
        host = socket.gethostname().partition(".")[0]
        for part in ("state", f"spool-{host}", "spool-second"):
            (folder / part).mkdir()
        ports = free_ports(3)
        configuration = CONFIGURATION.format(
            host=host,
            folder=folder,
            controller_port=ports[0],
            daemon_port=ports[1],
            second_port=ports[2],
            cores=cores,
        )
        (folder / "slurm.conf").write_text(configuration)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": search_path()}
        munge = ["--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
        munge += [f"--{kind}-file={folder}/munge.{kind}" for kind in ("log", "pid", "seed")]
        daemons.enter_context(daemon(folder, environment, "munged", *munge))
        wait_for(lambda: (folder / "munge.socket").exists(), folder)
        daemons.enter_context(daemon(folder, environment, "slurmctld", "-D", "-c"))
        for node in (host, "second"):
            daemons.enter_context(daemon(folder, environment, "slurmd", "-D", "-c", "-N", node))
        wait_for(
            lambda: (
                "idle 2" in output("sinfo", "--partition=wide", "--noheader", "--format=%T %D", environment=environment)
            ),
            folder,
        )
        yield environment


@contextmanager
def daemon(folder: Path, environment: dict[str, str], *command: str) -> Iterator[None]:
    log = folder / f"{command[0]}.out"
    with log.open("a") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def output(*command: str, environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()


def wait_for(holds: object, folder: Path) -> None:
    assert callable(holds)
    deadline = time.monotonic() + HANG_S
    while not holds():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in folder.glob("*.out"))
            raise TimeoutError(f"Slurm did not start within {HANG_S:g} seconds\n{logs}")
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
