"""Logprobs: time and peak memory of the reference against the functions in use today, in one run.

    python benchmarks/logprobs.py [--device cuda] [--repeats 3] [--threads N] [--json FILE] [--quick]

Peers: plain log_softmax and gather, TRL's selective_log_softmax, verl's logprobs_from_logits, and Liger's fused linear GRPO,
whose time includes the loss. Times are wall clock, taken in turns, and compared within each turn; the medians are shown.
Memory is what a fresh process needs beyond its inputs, at its peak. Errors are against float64, on some of the rows.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from rlcanary.reference import fused_linear_logprobs, token_logprobs

MIB = 2**20
ROWS_WITH_ERROR = 64


@dataclass(frozen=True)
class Case:
    """What is measured: B rows of T tokens, V vocabulary entries, D features where it starts from hidden states."""

    title: str
    implementations: dict[str, Callable[[list[Tensor]], Tensor]]
    shape: tuple[int, ...]
    quick_shape: tuple[int, ...]
    backward: bool

    def inputs(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
        """Logits, or hidden states and weight, and the ids; filled in place, so that making them leaves no peak."""
        torch.manual_seed(0)
        rows, tokens, vocabulary, *features = shape
        if features:
            hidden = torch.empty(rows, tokens, *features, dtype=dtype, device=device).normal_()
            weight = torch.empty(vocabulary, *features, dtype=dtype, device=device).normal_(std=2 * features[0] ** -0.5)
            scored = [hidden, weight]
        else:
            scored = [torch.empty(rows, tokens, vocabulary, dtype=dtype, device=device).normal_(std=2)]
        for tensor in scored:
            tensor.requires_grad_(self.backward)
        return [*scored, torch.randint(vocabulary, (rows, tokens), device=device)]

    def run(self, name: str, inputs: list[Tensor]) -> Tensor:
        """One pass; gradients are left on the inputs. Every token has another upstream gradient."""
        if not self.backward:
            with torch.no_grad():
                return self.implementations[name](inputs)
        output = self.implementations[name](inputs)
        if output.ndim:
            upstream = torch.linspace(-1, 2, output.numel(), device=output.device).view(output.shape)
            (output * upstream).sum().backward()
        else:
            output.backward()
        return output.detach()


def of_logits(score: Callable[[Tensor, Tensor], Tensor]) -> Callable[[list[Tensor]], Tensor]:
    """The same function of logits for both kinds of inputs."""

    def run(inputs: list[Tensor]) -> Tensor:
        *scored, ids = inputs
        return score(scored[0] @ scored[1].t() if len(scored) == 2 else scored[0], ids)

    return run


def plain(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def plain_upcast(logits: Tensor, ids: Tensor) -> Tensor:
    return plain(logits.float(), ids)


def trl(logits: Tensor, ids: Tensor) -> Tensor:
    scored: Tensor = import_module("trl.trainer.utils").selective_log_softmax(logits, ids)
    return scored


def verl(logits: Tensor, ids: Tensor) -> Tensor:
    scored: Tensor = import_module("verl.utils.torch_functional").logprobs_from_logits(logits, ids)
    return scored


def liger(inputs: list[Tensor]) -> Tensor:
    hidden, weight, ids = inputs
    chunked_loss = import_module("liger_kernel.chunked_loss")
    fused = chunked_loss.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=hidden.device.type != "cpu")
    advantages = torch.linspace(-1, 2, len(ids), device=ids.device)
    loss: Tensor = fused(hidden, weight, ids, torch.ones_like(ids), advantages)[0]
    return loss


def rlcanary_fused(inputs: list[Tensor]) -> Tensor:
    hidden, weight, ids = inputs
    return fused_linear_logprobs(hidden, weight, ids)


PEERS = {
    "plain": of_logits(plain),
    "plain, upcast": of_logits(plain_upcast),
    "TRL": of_logits(trl),
    "verl": of_logits(verl),
}
CASES = {
    "head": Case(
        "Hidden states to logprobs, forward and backward",
        {"rlcanary": rlcanary_fused, **PEERS, "Liger": liger},
        shape=(8, 512, 32768, 1024),
        quick_shape=(2, 64, 1024, 32),
        backward=True,
    ),
    "logits": Case(
        "Logits to logprobs, forward",
        {"rlcanary": of_logits(token_logprobs), **PEERS},
        shape=(8, 512, 32768),
        quick_shape=(2, 64, 1024),
        backward=False,
    ),
    "logits-backward": Case(
        "Logits to logprobs, forward and backward",
        {"rlcanary": of_logits(token_logprobs), **PEERS},
        shape=(8, 512, 32768),
        quick_shape=(2, 64, 1024),
        backward=True,
    ),
}
MODULES = {"TRL": "trl", "verl": "verl", "Liger": "liger_kernel"}


def clear(inputs: list[Tensor]) -> None:
    for tensor in inputs:
        tensor.grad = None
    gc.collect()


def seconds(case: Case, name: str, inputs: list[Tensor]) -> float:
    """Of one pass."""
    clear(inputs)
    is_cuda = inputs[0].is_cuda
    if is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    case.run(name, inputs)
    if is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def error(case: Case, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> float | None:
    """Largest difference from float64, for the given inputs as they are; None where there are no logprobs to compare."""
    inputs = [tensor.detach() for tensor in case.inputs((1, ROWS_WITH_ERROR, *shape[2:]), dtype, device)]
    with torch.no_grad():
        got = case.implementations[name](inputs)
        if not got.ndim:
            return None
        *scored, ids = inputs
        exact = of_logits(plain)([*(tensor.double() for tensor in scored), ids])
    return float((got.double() - exact).abs().max())


def peak_bytes(case: Case, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> int:
    """What one pass needs beyond its inputs, gradients included. Only right in a process that has done nothing else."""
    small = case.inputs(case.quick_shape, dtype, device)
    case.run(name, small)  # so that code which is loaded on first use does not count
    del small
    inputs = case.inputs(shape, dtype, device)
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.run(name, inputs)
        return torch.cuda.max_memory_allocated() - before
    before = resident_bytes("VmRSS")
    case.run(name, inputs)
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    """Memory of this process now (VmRSS) or at its peak since it started (VmHWM). getrusage's peak is older than that: it
    begins with the process that forked this one."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_in_a_fresh_process(key: str, name: str, dtype: str, device: str, quick: bool) -> int:
    command = [sys.executable, __file__, "--device", device, "--memory-of", key, name, dtype, *["--quick"] * quick]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stderr}")
    return int(finished.stdout.split()[-1])


def measure(key: str, dtype: str, arguments: argparse.Namespace, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """One row per implementation, or per peer that is not installed."""
    case = CASES[key]
    shape = case.quick_shape if arguments.quick else case.shape
    device, torch_dtype = arguments.device, getattr(torch, dtype)
    chosen = chosen_of(case, arguments.peer)
    names = [name for name in chosen if is_installed(name)]
    peaks, errors = {}, {}
    for name in names:
        peaks[name] = peak_in_a_fresh_process(key, name, dtype, device, arguments.quick)
        errors[name] = error(case, name, shape, torch_dtype, device)
        advance()
    inputs = case.inputs(shape, torch_dtype, device)
    turns: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(arguments.repeats + 1):
        for name in names if turn % 2 else reversed(names):
            taken = seconds(case, name, inputs)
            if turn > 0:  # the first turn warms up
                turns[name].append(taken)
            advance()
    rows: list[dict[str, Any]] = []
    for name in chosen:
        if name not in names:
            rows.append({"implementation": name, "note": "not installed"})
            continue
        rows.append(
            {
                "implementation": name,
                "seconds": statistics.median(turns[name]),
                "time_ratio": median_ratio(turns[name], turns["plain"]),
                "peak_mib": peaks[name] / MIB,
                "memory_ratio": peaks[name] / peaks["plain"] if peaks["plain"] else None,
                "error": errors[name],
                "turns": turns[name],
            }
        )
    return rows


def chosen_of(case: Case, peers: set[str]) -> list[str]:
    return [name for name in case.implementations if name == "rlcanary" or name in peers]


def is_installed(name: str) -> bool:
    return name not in MODULES or find_spec(MODULES[name]) is not None


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def promises(key: str, dtype: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the project says of itself, with what was measured."""
    of = {row["implementation"]: row for row in rows if "seconds" in row}
    ours = of["rlcanary"]

    def promise(text: str, value: float, bound: float) -> dict[str, Any]:
        return {"promise": f"{text}, {dtype}", "value": value, "bound": bound, "kept": value <= bound}

    kept = []
    if key == "head":
        kept.append(promise("fused head: peak memory against plain", ours["memory_ratio"], 0.30))
        if dtype == "float32":
            kept.append(promise("fused head: time against plain", ours["time_ratio"], 1.3))
        if "Liger" in of:
            kept.append(
                promise("fused head: time against Liger", median_ratio(ours["turns"], of["Liger"]["turns"]), 1.0)
            )
    if key == "logits" and "TRL" in of:
        kept.append(promise("logits, forward: time against TRL", median_ratio(ours["turns"], of["TRL"]["turns"]), 1.0))
        kept.append(promise("logits, forward: peak memory against TRL", ours["peak_mib"] / of["TRL"]["peak_mib"], 1.0))
    return kept


def table_of(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("Implementation")
    for heading in ("Seconds", "Time / plain", "Peak MiB", "Memory / plain", "Error"):
        table.add_column(heading, justify="right")
    for row in rows:
        if "note" in row:
            table.add_row(row["implementation"], row["note"])
            continue
        table.add_row(
            row["implementation"],
            f"{row['seconds']:.3f}",
            f"{row['time_ratio']:.2f}",
            f"{row['peak_mib']:.0f}",
            "" if row["memory_ratio"] is None else f"{row['memory_ratio']:.2f}",
            "" if row["error"] is None else f"{row['error']:.1e}",
            style="bold" if row["implementation"] == "rlcanary" else None,
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", choices=CASES, action="append", help="only this case; may be repeated")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), action="append", help="only this dtype")
    parser.add_argument("--peer", choices=[*PEERS, "Liger"], action="append", help="only this peer, and plain")
    parser.add_argument("--repeats", type=int, default=3, help="turns per implementation (default: 3)")
    parser.add_argument("--threads", type=int, help="of torch on the CPU: 1 is steadier where others use the machine")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="small shapes, one turn: shows that it runs, no more")
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    if arguments.memory_of:
        key, name, dtype = arguments.memory_of
        case = CASES[key]
        shape = case.quick_shape if arguments.quick else case.shape
        print(peak_bytes(case, name, shape, getattr(torch, dtype), arguments.device))
        return

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    arguments.peer = {"plain", *(arguments.peer or [*PEERS, "Liger"])}
    arguments.repeats = 1 if arguments.quick else max(1, arguments.repeats)
    keys, dtypes = arguments.case or list(CASES), arguments.dtype or ["float32", "bfloat16"]
    console = Console(width=120)
    results, kept = [], []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        measured = [name for key in keys for name in chosen_of(CASES[key], arguments.peer) if is_installed(name)]
        task = progress.add_task("measuring", total=len(measured) * len(dtypes) * (arguments.repeats + 2))
        for key in keys:
            for dtype in dtypes:
                progress.update(task, description=f"{key}, {dtype}")
                rows = measure(key, dtype, arguments, lambda: progress.advance(task))
                shape = CASES[key].quick_shape if arguments.quick else CASES[key].shape
                results.append({"case": key, "dtype": dtype, "shape": shape, "rows": rows})
                kept += [] if arguments.quick else promises(key, dtype, rows)
    for result in results:
        console.print(table_of(f"{CASES[result['case']].title}, {result['dtype']}, {result['shape']}", result["rows"]))
    for line in kept:
        word = "[green]kept  [/]" if line["kept"] else "[red]missed[/]"
        console.print(f"{word} {line['promise']}: {line['value']:.2f}, at most {line['bound']:.2f}")
    if arguments.json:
        device = (
            torch.cuda.get_device_name() if arguments.device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
        )
        report = {"device": device, "torch": torch.__version__, "results": results, "promises": kept}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
