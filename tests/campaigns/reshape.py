"""A checkpoint directory cut anew, with what it takes in memory: peaks per process, and every element compared.

    python tests/campaigns/reshape.py [--gb 2] [--limit-mb 300] [--json FILE] [--slice NAME]

Peaks are VmHWM of `/proc`: everything a process has in memory, pages of mapped files, torch and Python among it. What
was written is read back with safetensors' own reader and compared with slices of the source. Rows:

- `refit push`, one process: whole to tp=4, whole to whole in small files, and with a cast;
- two sources and two targets over the default fabric, from the directory to tp=2.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import multiprocessing as mp
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

HIDDEN, WIDE, HEADS, KV_HEADS, VOCAB = 2048, 8192, 16, 4, 32000
DIMS = {
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "o_proj": 1,
    "gate_proj": 0,
    "up_proj": 0,
    "down_proj": 1,
    "embed_tokens": 0,
}
FAILED: list[str] = []


def shapes(layer: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer: 59 million elements."""
    kv = HIDDEN // HEADS * KV_HEADS
    attn = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (kv, HIDDEN), "v_proj": (kv, HIDDEN), "o_proj": (HIDDEN, HIDDEN)}
    mlp = {"gate_proj": (WIDE, HIDDEN), "up_proj": (WIDE, HIDDEN), "down_proj": (HIDDEN, WIDE)}
    named = {f"self_attn.{name}": shape for name, shape in attn.items()} | {f"mlp.{n}": s for n, s in mlp.items()}
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in named.items()}


def make(folder: Path, nbytes: int) -> None:
    """A float32 checkpoint of at least `nbytes`, a file a layer."""
    folder.mkdir()
    weight_map, total = {}, 0
    generator = torch.Generator().manual_seed(0)
    wanted: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(10**6):
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in wanted.items()}
        save_file(tensors, folder / f"part-{layer}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"part-{layer}.safetensors")
        total += sum(tensor.nbytes for tensor in tensors.values())
        if total >= nbytes:
            break
        wanted = shapes(layer)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    (folder / "config.json").write_text(json.dumps(config))


def slices(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of a folder, by safetensors' own reader, as slices that are read when asked for."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, not a mapping
                yield name, opened.get_slice(name)


def compare(source: Path, target: Path, size: int, dtype: torch.dtype) -> int:
    """Elements that were compared; what differs is kept in FAILED."""
    whole = dict(slices(source))
    count = 0
    for rank in range(size):
        found = dict(slices(target / f"rank-{rank}" if size > 1 else target))
        if found.keys() != whole.keys():
            FAILED.append(f"{target.name} rank {rank} has {len(found)} tensors of {len(whole)}")
        for name, part in found.items():
            expected = share(whole[name], name, rank, size).to(dtype)
            if not torch.equal(expected, part[:]):
                FAILED.append(f"{target.name} rank {rank}: {name} differs")
            count += expected.numel()
    return count


def share(whole: Any, name: str, rank: int, size: int) -> torch.Tensor:
    """The rank's part: equal shares of the dim that the tensor's kind is cut in."""
    dim = next((dim for kind, dim in DIMS.items() if kind in name), None)
    if dim is None:
        return torch.as_tensor(whole[:])
    extent = whole.get_shape()[dim]
    run = slice(rank * extent // size, (rank + 1) * extent // size)
    return torch.as_tensor(whole[run] if dim == 0 else whole[:, run])


def peak_mb() -> float:
    """The most memory this process has had."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) / 1000


def command(arguments: list[str], peak: Any) -> None:
    """The body of a process that is `refit` with these arguments."""
    from refit_sdk.cli import app

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        app(arguments, standalone_mode=False)
    peak.send(peak_mb())


def rank(side: str, number: int, source: Path, target: Path, where: str, peak: Any) -> None:
    """The body of a rank of a session."""
    from refit_sdk.exporting import Export
    from refit_sdk.session import RefitSession

    torch.set_num_threads(1)
    common: dict[str, Any] = {"rendezvous": where, "rank": number, "size": 2}
    if side == "source":
        with RefitSession.source(source, window_bytes=4 << 20, **common) as session:
            session.push(version=1)
    else:
        with RefitSession.target(Export.like(source, target, layout="tp=2"), engine="files", **common) as session:
            session.receive()
    peak.send(peak_mb())


def run(bodies: list[tuple[Any, tuple[Any, ...]]]) -> tuple[float, list[float]]:
    """Seconds, and the peak of each process."""
    context = mp.get_context("spawn")
    begun, started = time.perf_counter(), []
    for body, args in bodies:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=body, args=(*args, there))
        process.start()
        there.close()
        started.append((process, here))
    peaks = []
    for process, pipe in started:
        try:
            peaks.append(pipe.recv())
        except EOFError:
            process.join()
            FAILED.append(f"a process ended with {process.exitcode}")
        process.join()
    return time.perf_counter() - begun, peaks


def row(
    name: str, bodies: list[Any], source: Path, target: Path, size: int, dtype: torch.dtype, limit: float
) -> dict[str, Any]:
    """Run, measure, compare, and clean up."""
    seconds, peaks = run(bodies)
    count = compare(source, target, size, dtype) if len(peaks) == len(bodies) else 0
    shutil.rmtree(target, ignore_errors=True)
    if max(peaks, default=0) > limit:
        FAILED.append(f"{name}: a process had {max(peaks):.0f} MB, more than {limit:g}")
    told = {"what": name, "seconds": seconds, "peaks_mb": peaks, "elements": count}
    shown = ", ".join(f"{peak:.0f}" for peak in peaks)
    print(f"| {name} | {seconds:.1f} | {shown} | {count} |", flush=True)
    return told


def free_rendezvous() -> str:
    """An address that is free now."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{sock.getsockname()[1]}"


def rows(folder: Path, limit: float) -> list[dict[str, Any]]:
    """All rows."""
    source, where = folder / "source", free_rendezvous()
    float32, bfloat16 = torch.float32, torch.bfloat16

    def push(target: str, *more: str) -> list[Any]:
        return [(command, (["push", "--from", str(source), "--to", str(folder / target), *more],))]

    ranks = [(rank, (side, n, source, folder / "d", where)) for side in ("source", "target") for n in range(2)]
    small = push("b", "--max-shard-size", "100MB")
    cast = push("c", "--target-layout", "tp=2", "--dtype", "bfloat16")
    return [
        row("refit push, to tp=4", push("a", "--target-layout", "tp=4"), source, folder / "a", 4, float32, limit),
        row("refit push, files of 100 MB", small, source, folder / "b", 1, float32, limit),
        row("refit push, to tp=2 in bfloat16", cast, source, folder / "c", 2, bfloat16, limit),
        row("2 sources, 2 targets, to tp=2", ranks, source, folder / "d", 2, float32, limit),
    ]


def main() -> int:
    """Make the checkpoint, run, say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--limit-mb", type=float, help="300 for a whole run; a slice judges elements, and tells memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--slice")
    asked = parser.parse_args()
    limit = asked.limit_mb or (math.inf if asked.slice else 300.0)
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="refit-reshape-"))
    try:
        make(folder / "source", int((0.5 if asked.slice else asked.gb) * 1e9))
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        print(f"commit {commit}, {time.strftime('%Y-%m-%d')}, limit {limit:g} MB a process")
        print("| what | seconds | peak MB of each process | elements compared |\n|---|---|---|---|")
        told = rows(folder, limit)
    finally:
        shutil.rmtree(folder)
    if asked.json:
        asked.json.write_text(json.dumps(told, indent=2))
    for line in FAILED:
        print(f"failed: {line}")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
