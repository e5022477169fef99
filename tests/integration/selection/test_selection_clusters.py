"""Selection on clusters that are not the test's own: started before pytest, shared, of several nodes."""

import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from selection_session import clean_environment, edited, run_testmon, selected, write_project

CLUSTER = """
import sys
import ray
while not ray.is_initialized():
    try:
        context = ray.init(num_cpus=6, include_dashboard=False, logging_level="error", _temp_dir=sys.argv[1])
    except Exception as error:  # after 30 seconds, which a busy machine takes longer than
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""
FILES = {
    "work/__init__.py": "",
    "work/first.py": "def first(x):\n    return x\n",
    "work/second.py": "def second(x):\n    return x\n",
    "work/actors.py": """
        import ray
        from work.first import first
        from work.second import second

        @ray.remote(num_cpus=0)
        class Both:
            def a(self):
                return first(1)

            def b(self):
                return second(1)

        @ray.remote
        def task():
            return second(2)
        """,
    "conftest.py": """
        import os
        import pytest
        import ray

        @pytest.fixture(scope="session", autouse=True)
        def cluster():
            ray.init(address=os.environ["ADDRESS"], namespace="selection", logging_level="error")
            yield
            ray.shutdown()
        """,
}
MEET = """
    import time
    from pathlib import Path

    def meet(name):
        Path(__file__).with_name(name + ".here").touch()
        while len(list(Path(__file__).parent.glob("*.here"))) < 2:
            time.sleep(0.05)
    """


def project(folder: Path, **tests: str) -> Path:
    files = {name: textwrap.dedent(text) for name, text in {**FILES, "meet.py": MEET}.items()}
    files |= {f"test_{name}.py": textwrap.dedent(text) for name, text in tests.items()}
    return write_project(folder / "project", files)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster that some other program started, which knows nothing of rlcanary."""
    folder = Path(
        f"/tmp/rlc-{tmp_path_factory.getbasetemp().parent.name[-6:]}-{tmp_path_factory.getbasetemp().name[-6:]}"
    )
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate("")


@pytest.fixture
def address(cluster: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The cluster's address, in a variable that the project reads, and on which its tests therefore depend."""
    monkeypatch.setenv("ADDRESS", cluster)
    return cluster


def test_a_cluster_that_was_there_before_pytest(tmp_path: Path, address: str) -> None:
    folder = project(
        tmp_path,
        one="""
            import ray
            from work.actors import Both, task

            def test_actor():
                assert ray.get(Both.remote().a.remote()) == 1

            def test_task():
                assert ray.get(task.remote()) == 2
            """,
    )
    run = run_testmon(folder, ADDRESS=address)
    assert run.returncode == 0, run.stdout
    assert "were not recorded" not in run.stdout
    with edited(folder, "work/first.py", "return x", "return x + 0"):
        assert selected(folder) == {"test_actor"}
    with edited(folder, "work/second.py", "return x", "return x + 0"):
        assert selected(folder) == {"test_task"}


def test_tests_that_use_one_actor_at_the_same_time_are_told_apart(tmp_path: Path, address: str) -> None:
    test = """
        import ray
        from meet import meet
        from work.actors import Both

        def test_{name}():
            actor = Both.options(name="shared", get_if_exists=True, lifetime="detached", max_concurrency=4).remote()
            meet("{name}")
            for _ in range(100):
                assert ray.get(actor.{name}.remote()) == 1
        """
    folder = project(tmp_path, a=test.format(name="a"), b=test.format(name="b"))
    run = run_testmon(folder, "-n", "2", "-p", "no:rlcanary-cleanup", ADDRESS=address)
    assert run.returncode == 0, run.stdout
    assert "were not recorded" not in run.stdout
    with edited(folder, "work/first.py", "return x", "return x + 0"):
        assert selected(folder) == {"test_a"}
    with edited(folder, "work/second.py", "return x", "return x + 0"):
        assert selected(folder) == {"test_b"}


@pytest.fixture(scope="module")
def python_without_rlcanary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with Ray, and without rlcanary."""
    folder = tmp_path_factory.mktemp("venv") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = folder / "bin/python"
    absent = subprocess.run([str(python), "-c", "import ray, rlcanary"], capture_output=True, text=True, check=False)
    assert "No module named 'rlcanary'" in absent.stderr
    return python


def test_workers_of_an_environment_without_rlcanary(
    tmp_path: Path, address: str, python_without_rlcanary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_PYTHON", str(python_without_rlcanary))
    folder = project(
        tmp_path,
        one="""
            import os
            import ray
            from work.actors import Both, task

            ENVIRONMENT = {"py_executable": os.environ["OTHER_PYTHON"]}

            def test_actor():
                assert ray.get(Both.options(runtime_env=ENVIRONMENT).remote().a.remote()) == 1
            """,
    )
    run = run_testmon(folder, ADDRESS=address, OTHER_PYTHON=str(python_without_rlcanary))
    assert run.returncode == 0, run.stdout
    assert "were not recorded" not in run.stdout
    with edited(folder, "work/first.py", "return x", "return x + 0"):
        assert selected(folder) == {"test_actor"}
    with edited(folder, "work/second.py", "return x", "return x + 0"):
        assert selected(folder) == set()


READING = """
from pathlib import Path

def second(x):
    return x * int(Path(__file__).with_name("rate.json").read_text())
"""
NODES = """
    import pytest
    import ray
    from rlcanary.cleanup.ray_start import start_ray
    from ray.cluster_utils import Cluster

    def two_nodes():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        cluster.add_node(num_cpus=2, resources={"other": 2})
        return cluster

    @pytest.fixture(scope="session", autouse=True)
    def cluster():
        cluster = start_ray(two_nodes)
        ray.init(address=cluster.address, logging_level="error", runtime_env={"working_dir": "."})
        yield
        ray.shutdown()
        cluster.shutdown()
    """


def test_several_nodes_and_an_uploaded_working_dir(tmp_path: Path) -> None:
    folder = project(
        tmp_path,
        one="""
            import ray
            from work.actors import Both, task

            def test_actor():
                assert ray.get(Both.options(resources={"other": 1}).remote().a.remote()) == 1

            def test_task():
                assert ray.get(task.options(resources={"other": 1}).remote()) == 2
            """,
    )
    (folder / "conftest.py").write_text(textwrap.dedent(NODES))
    (folder / "work/rate.json").write_text("1")
    (folder / "work/second.py").write_text(READING)
    run = run_testmon(folder)
    assert run.returncode == 0, run.stdout
    assert "were not recorded" not in run.stdout
    with edited(folder, "work/first.py", "return x", "return x + 0"):
        assert selected(folder) == {"test_actor"}
    with edited(folder, "work/actors.py", "return second(2)", "return second(2) + 0"):
        assert selected(folder) == {"test_task"}
    with edited(folder, "work/rate.json", "1", "2"):
        assert selected(folder) == {"test_task"}


PREPARED = """
    import pytest
    import ray
    from rlcanary.cleanup.ray_start import start_ray

    @pytest.fixture(scope="session", autouse=True)
    def cluster():
        start_ray(lambda: ray.init(num_cpus=2, include_dashboard=False, logging_level="error", {options}))
        yield
        ray.shutdown()
    """


@pytest.mark.parametrize(
    "options",
    [
        'runtime_env={"worker_process_setup_hook": "work.prepare.prepare"}',
        '_system_config={"preload_python_modules": ["work.prepare"]}',
    ],
    ids=["hook", "preload"],
)
def test_what_a_worker_runs_before_its_first_task(tmp_path: Path, options: str) -> None:
    folder = project(
        tmp_path,
        one="""
            import ray

            @ray.remote
            def task():
                return 2

            def test_task():
                assert ray.get(task.remote()) == 2

            def test_here():
                pass
            """,
    )
    (folder / "conftest.py").write_text(textwrap.dedent(PREPARED.replace("{options}", options)))
    prepare = "from work.second import second\n\ndef prepare():\n    second(1)\n\nprepare()\n"
    (folder / "work/prepare.py").write_text(prepare)
    run = run_testmon(folder, PYTHONPATH=str(folder))
    assert run.returncode == 0, run.stdout
    with edited(folder, "work/second.py", "return x", "return x + 0"):
        assert selected(folder) == {"test_task"}
