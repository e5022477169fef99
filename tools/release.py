"""Build the source distribution and the wheel, and check them: contents, metadata, and installed.

    python tools/release.py [--out dist] [--install PYTHON]... [--torch]

The files that git tracks, as they are in the checkout, are built in a folder of their own: the wheel from the source
distribution, so that both are whole. `--install` installs the wheel into a bare environment of that Python and starts it
there; `--torch` also checks the reference and plays the demo from the wheel, with the torch of this Python.
"""

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from email.parser import BytesParser
from pathlib import Path

from packaging.metadata import Metadata
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"harness": "rlcanary", "plugins": "pytest_rlcanary"}
MOST_PACKAGES = 25
HEAVY = ("torch", "ray", "vllm", "transformers")
START = f"""
import sys, pytest, rlcanary
from rlcanary import cli
code = pytest.main(["-q", "-p", "no:cacheprovider", "test_one.py"])
heavy = [name for name in {HEAVY} if name in sys.modules]
sys.exit(f"starting imports {{heavy}}" if heavy else int(code))
"""


class Broken(Exception):
    """A distribution lacks something, or does not run. The message says what."""


def build(out: Path) -> tuple[Path, Path]:
    """Build both distributions of the tracked files into a folder; return the source distribution and the wheel."""
    version = str(Version(runpy.run_path(str(ROOT / "setup.py"))["version"]()))
    with tempfile.TemporaryDirectory(prefix="rlcanary-release-") as name:
        copied = Path(name, "sources")
        for file in tracked("."):
            (copied / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, copied / file)
        built = Path(name, "dist")
        run([sys.executable, "-m", "build", "--no-isolation", "--outdir", built, copied], RLCANARY_VERSION=version)
        out.mkdir(parents=True, exist_ok=True)
        sdist, wheel = (
            Path(shutil.copy(next(built.glob(pattern)), out)) for pattern in ("rlcanary-*.tar.gz", "rlcanary-*.whl")
        )
    return sdist, wheel


def tracked(folder: str) -> list[str]:
    """List the files in a folder of the checkout that git tracks and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def check_contents(sdist: Path, wheel: Path) -> None:
    """Compare the files of both with those that git tracks.

    Raises:
        Broken: a file is missing, or there is one that nobody wrote.
    """
    wanted = {str(Path(name).relative_to(folder)) for folder in PACKAGES for name in tracked(folder)}
    with zipfile.ZipFile(wheel) as archive:
        got = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    if got != wanted:
        raise Broken(f"{wheel.name}: missing {sorted(wanted - got)}, too many {sorted(got - wanted)}")
    if len(licences) != 1:
        raise Broken(f"{wheel.name} has no license")
    with tarfile.open(sdist) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    sources = {f"{folder}/{name}" for folder in PACKAGES for name in wanted if (ROOT / folder / name).is_file()}
    needed = sources | {"README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md", "pyproject.toml", "setup.py", "PKG-INFO"}
    if missing := needed - there:
        raise Broken(f"{sdist.name}: missing {sorted(missing)}")


def check_metadata(wheel: Path) -> Metadata:
    """Validate the metadata of the wheel against its standard, and return it.

    Raises:
        Broken: a field is missing or does not fit, or the version is not that of the file.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        content = archive.read(name)
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        entry_points = archive.read(name).decode()
    metadata = Metadata.from_email(content, validate=True)
    headers = BytesParser().parsebytes(content)
    if headers["Description-Content-Type"] != "text/markdown" or "# rlcanary" not in (metadata.description or ""):
        raise Broken(f"{wheel.name}: the README is not its description")
    if str(metadata.version) != wheel.name.split("-")[1]:
        raise Broken(f"{wheel.name}: its version is {metadata.version}")
    if "[pytest11]" not in entry_points or "rlcanary = rlcanary.cli:main" not in entry_points:
        raise Broken(f"{wheel.name}: no command, or no plugins")
    return metadata


def check_installed(wheel: Path, python: str, folder: Path) -> str:
    """Install the wheel into a bare environment, start the command and pytest there, and say what was installed.

    Raises:
        Broken: too many packages, a heavy one, or a start that fails or imports one.
    """
    environment = folder / "environment"
    run([python, "-m", "venv", environment])
    inside = environment / "bin"
    run([inside / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel])
    run([inside / "python", "-m", "pip", "check"])
    listed = run([inside / "python", "-m", "pip", "list", "--format=freeze", "--exclude=pip", "--exclude=setuptools"])
    names = [line.partition("==")[0].lower() for line in listed.splitlines()]
    if len(names) > MOST_PACKAGES or set(HEAVY) & set(names):
        raise Broken(f"{python} installs {len(names)} packages: {', '.join(names)}")
    (folder / "test_one.py").write_text("def test_one():\n    pass\n")
    run([inside / "rlcanary", "--help"], cwd=folder)
    run([inside / "python", "-c", START], cwd=folder)
    version = run([inside / "python", "--version"]).strip()
    return f"{version}: {len(names)} packages, {run([inside / 'rlcanary', '--version']).strip()}"


def check_with_torch(wheel: Path, folder: Path) -> str:
    """Install the wheel beside the packages of this Python, check the reference and play the demo from it.

    Raises:
        Broken: one of them fails, or rlcanary is not that of the wheel.
    """
    environment = folder / "with-torch"
    venv.create(environment, with_pip=True)
    inside = environment / "bin"
    run([inside / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel])
    (site,) = environment.glob("lib/python3*/site-packages")
    # Behind the wheel on the path; the .pth file of an editable rlcanary there is not read.
    (site / "torch.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    where = run([inside / "python", "-c", "import rlcanary; print(rlcanary.__file__)"], cwd=folder).strip()
    if not where.startswith(str(site)):
        raise Broken(f"rlcanary is {where}, not that of the wheel")
    variables = {"OMP_NUM_THREADS": "1", "PATH": f"{inside}{os.pathsep}{os.environ['PATH']}"}
    checked = run([inside / "rlcanary", "check", "reference"], cwd=folder, **variables).splitlines()[-1]
    played = run([inside / "python", ROOT / "tools/demo/play.py", "--nights", "3"], cwd=folder, **variables)
    named = re.findall(r"[0-9a-f]{40} is the first bad commit", played)
    return f"{checked}; demo: {named[-1] if named else 'no commit'}"


def run(command: Sequence[object], cwd: Path | None = None, **variables: str) -> str:
    """Run a command and return what it prints.

    Raises:
        Broken: it fails; the message has the end of its output.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Broken(f"{' '.join(words)[:200]} exits with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder for the distributions")
    parser.add_argument("--install", action="append", default=[], metavar="PYTHON", help="install into a bare one")
    parser.add_argument("--torch", action="store_true", help="check the reference and play the demo from the wheel")
    options = parser.parse_args()
    try:
        sdist, wheel = build(options.out)
        check_contents(sdist, wheel)
        print(f"{wheel.name}: contents and metadata are right, version {check_metadata(wheel).version}")
        for python in options.install:
            with tempfile.TemporaryDirectory(prefix="rlcanary-install-") as folder:
                print(check_installed(wheel, python, Path(folder)))
        if options.torch:
            with tempfile.TemporaryDirectory(prefix="rlcanary-install-") as folder:
                print(check_with_torch(wheel, Path(folder)))
    except Broken as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
