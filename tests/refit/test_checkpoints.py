"""Checkpoint directories on either side of a push: bit-exact, read no more than is sent, and no crash loses any."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from refit_sdk import staging
from refit_sdk.box import Box
from refit_sdk.checkpoint import INDEX, SINGLE, CheckpointError
from refit_sdk.cli import app
from refit_sdk.cli.push import reshape
from refit_sdk.errors import LayoutError
from refit_sdk.exporting import RECORD, Export, Wanted
from refit_sdk.layout import Layout
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Replicate, Shard
from refit_sdk.session import RefitSession
from refit_sdk.testing import judge, torch_fill
from refit_sdk.testing.crew import Crew, crew, meet
from refit_sdk.testing.models import SEED, Held, Model, beside, spread
from refit_sdk.testing.ranks import Rank, free_rendezvous, running

SIZE = 5
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (11, 6), "model.layers.0.self_attn.q_proj.weight": (8, 6),
    "model.layers.0.self_attn.k_proj.weight": (4, 6), "model.layers.0.self_attn.v_proj.weight": (4, 6),
    "model.layers.0.self_attn.o_proj.weight": (6, 8), "model.layers.0.mlp.down_proj.weight": (6, 12),
    "model.layers.0.input_layernorm.weight": (6,), "model.layers.0.mlp.down_proj.bias": (6,),
}  # fmt: skip
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2}


def bits(name: str, shape: tuple[int, ...], version: int, dtype: str = "float32") -> Any:
    return judge.expected(name, shape, [0] * len(shape), shape, dtype, SEED, version)


def values(version: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: str = "float32") -> dict[str, Any]:
    """The judge's values as tensors."""
    made = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, shape in shapes.items()}
    for name, tensor in made.items():
        torch_fill.fill(tensor, bits(name, shapes[name], version, dtype))
    return made


def write(folder: Path, tensors: Mapping[str, Any], *, files: int = 1) -> Path:
    """A checkpoint, by safetensors' own writer."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = sorted(tensors)
    if files == 1:
        save_file(dict(tensors), folder / SINGLE)
        return folder
    groups = {f"m-{n}.safetensors": names[n::files] for n in range(files)}
    for file, inside in groups.items():
        save_file({name: tensors[name] for name in inside}, folder / file)
    weight_map = {name: file for file, inside in groups.items() for name in inside}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def read(folder: Path) -> dict[str, Any]:
    """What a folder holds, by safetensors' own reader, as its index says if it has one."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            found |= {name: (path.name, torch_fill.read(opened.get_tensor(name))) for name in opened.keys()}  # noqa: SIM118
    if (folder / INDEX).exists():
        assert json.loads((folder / INDEX).read_text())["weight_map"] == {
            name: file for name, (file, _) in found.items()
        }
    else:
        assert {file for file, _ in found.values()} <= {SINGLE}
    return {name: read for name, (_, read) in found.items()}


def faults(folder: Path, version: int, dtype: str = "float32") -> list[str]:
    """Where a whole checkpoint isn't the judge's."""
    found = read(folder)
    assert found.keys() == SHAPES.keys()
    wanted = {name: judge.cast(bits(name, shape, version), "float32", dtype) for name, shape in SHAPES.items()}
    return [f"{name} {wrong}" for name in found for wrong in judge.compare(found[name], wanted[name])]


def left(folder: Path) -> list[str]:
    """What is beside a directory that should be alone."""
    return sorted(path.name for path in folder.parent.glob(f"{folder.name}.*"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(SIZE) as made:
        yield made


def push_directory(rank: Rank, folder: Path, number: int, where: str) -> None:
    """A source that pushes what the directory has, twice."""
    with RefitSession.source(folder, rendezvous=where, rank=number, size=2, deadline=20) as session:
        for version in (1, 2):
            rank.meet(f"written {version}")
            session.push(version=version)


def take(rank: Rank, held: list[Held], number: int, where: str) -> None:
    """A target in memory, judged twice."""
    model = Model(held)
    with RefitSession.target(model, engine="e", rendezvous=where, rank=number, size=3, deadline=20) as session:
        for version in (1, 2):
            model.poison()
            rank.meet(f"written {version}")
            session.receive()
            assert model.faults(version=version) == []


@pytest.mark.parametrize("files", [1, 3], ids=["one file", "an index"])
def test_a_directory_is_a_source_and_may_be_written_anew(ranks: Crew, tmp_path: Path, files: int) -> None:
    dtypes = ["float32", "bfloat16", "float16", "int8", "int64", "uint8", "bool", "float8_e4m3fn", "float64"]
    shapes = {f"as.{dtype}": (6, 5) for dtype in dtypes} | {"scalar": ()}
    stored = {f"as.{dtype}": dtype for dtype in dtypes} | {"scalar": "float32"}

    def put(version: int) -> None:
        tensors: dict[str, Any] = {}
        for name, shape in shapes.items():
            tensors |= values(version, {name: shape}, stored[name])
        write(tmp_path / "new", tensors | {"empty": torch.empty(0, 4)}, files=files)
        shutil.rmtree(tmp_path / "there", ignore_errors=True)
        (tmp_path / "new").rename(tmp_path / "there")

    cut = Layout(Mesh(range(3)), [Shard(1)])
    whole = Layout(Mesh(range(3)), [Replicate()])
    layouts = {name: whole if shape == () else cut for name, shape in shapes.items()}
    held = beside(*(spread(name, shapes[name], layouts[name], size=3, stored=stored[name]) for name in shapes))
    where = free_rendezvous()
    put(1)
    jobs: Any = [(push_directory, (tmp_path / "there", n, where)) for n in range(2)]
    with ranks.at_work([*jobs, *((take, (list(held[n]), n, where)) for n in range(3))]) as working:
        meet(working, "written 1")
        for rank in working:
            rank.expect("written 2")
        put(2)
        for rank in working:
            rank.go("written 2")
        assert [rank.outcome() for rank in working] == [None] * SIZE


def push_memory(rank: Rank, held: list[Held], number: int, size: int, where: str, versions: tuple[int, ...]) -> None:
    """A source in memory."""
    model = Model(held)
    with RefitSession.source(model, rendezvous=where, rank=number, size=size, deadline=20) as session:
        for version in versions:
            model.fill(version=version)
            rank.meet(f"push {version}")
            session.push(version=version)


def export(rank: Rank, target: Export, number: int, size: int, where: str, versions: tuple[int, ...]) -> None:
    """A rank that writes a directory."""
    with RefitSession.target(target, engine="disk", rendezvous=where, rank=number, size=size, deadline=20) as session:
        for version in versions:
            rank.meet(f"push {version}")
            session.receive()


@pytest.mark.parametrize("writers", [1, 2], ids=["one writer", "two writers"])
def test_trainers_write_a_directory_twice(ranks: Crew, tmp_path: Path, writers: int) -> None:
    layout = Layout(Mesh(range(3)), [Shard(0)])
    held = beside(*(spread(name, shape, layout, size=3) for name, shape in SHAPES.items()))
    wanted = {name: Wanted(shape, "float32") for name, shape in SHAPES.items()}
    target = Export(directory=tmp_path / "out", tensors=wanted, shard_bytes=300)
    where = free_rendezvous()
    jobs: Any = [(push_memory, (list(held[n]), n, 3, where, (5, 6))) for n in range(3)]
    jobs += [(export, (target, n, writers, where, (5, 6))) for n in range(writers)]
    with ranks.at_work(jobs) as working:
        meet(working, "push 5")
        for rank in working:
            rank.expect("push 6")
        assert faults(tmp_path / "out", 5) == []
        for rank in working:
            rank.go("push 6")
        assert [rank.outcome() for rank in working] == [None] * len(jobs)
    assert faults(tmp_path / "out", 6) == []
    assert json.loads((tmp_path / "out" / RECORD).read_text())["version"] == 6
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 5
    assert left(tmp_path / "out") == []


def fail(rank: Rank, number: int, where: str) -> None:
    """A source whose values don't fit what is written."""
    shape = SHAPES["model.embed_tokens.weight"]
    tensors = {"model.embed_tokens.weight": torch.full(shape, 1e30)}
    casts = [("*", "float16")]
    with RefitSession.source(tensors, rendezvous=where, rank=number, size=1, casts=casts, deadline=20) as session:
        rank.meet("push 1")
        session.push(version=1)


def test_a_failed_push_leaves_the_old_directory(ranks: Crew, tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    old = Export(directory=tmp_path / "out", tensors={name: Wanted(SHAPES[name], "float32")})
    write(tmp_path / "in", values(1, {name: SHAPES[name]}))
    reshape(tmp_path / "in", old, casts=[], window_bytes=64)
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    new = Export(directory=tmp_path / "out", tensors={name: Wanted(SHAPES[name], "float16")})
    where = free_rendezvous()
    with ranks.at_work([(fail, (0, where)), (export, (new, 0, 1, where, (1,)))]) as working:
        meet(working, "push 1")
        assert [rank.outcome().kind for rank in working] == ["PushError", "PushError"]
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert left(tmp_path / "out") == []


def oracle(name: str, shape: tuple[int, ...], rank: int, size: int) -> tuple[slice, ...]:
    """The part of a tensor that a tensor-parallel rank has, written out kind by kind."""
    if "q_proj" in name:
        return (slice(rank * shape[0] // size, (rank + 1) * shape[0] // size),)
    if "k_proj" in name or "v_proj" in name:
        heads, rows = CONFIG["num_key_value_heads"], shape[0] // CONFIG["num_key_value_heads"]
        first = rank * heads // size if heads >= size else rank // (size // heads)
        return (slice(first * rows, (first + max(1, heads // size)) * rows),)
    if "embed" in name:
        step = (shape[0] + size - 1) // size
        return (slice(rank * step, (rank + 1) * step),)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return (slice(None), slice(rank * shape[1] // size, (rank + 1) * shape[1] // size))
    return (slice(None),)[: len(shape)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_directory_is_cut_for_ranks(tmp_path: Path, size: int, dtype: str | None) -> None:
    source = write(tmp_path / "in", values(3), files=2)
    layout = "whole" if size == 1 else f"tp={size}"
    arguments = ["push", "--from", str(source), "--to", str(tmp_path / "out"), "--target-layout", layout, "--json"]
    arguments += ["--max-shard-size", "200", "--window-size", "100", *(("--dtype", dtype) if dtype else ())]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert (told["ranks"], told["tensors"]) == (size, len(SHAPES))
    for rank in range(size):
        found = read(tmp_path / "out" / f"rank-{rank}" if size > 1 else tmp_path / "out")
        assert found.keys() == SHAPES.keys()
        for name, shape in SHAPES.items():
            whole = judge.cast(bits(name, shape, 3), "float32", dtype or "float32")
            part = whole if size == 1 else whole[oracle(name, shape, rank, size)]
            assert judge.compare(found[name], part) == []
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG
    gc.collect()
    assert left(tmp_path / "out") == []


def test_transformers_loads_what_was_written(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "in")
    reshape(
        tmp_path / "in", Export.like(tmp_path / "in", tmp_path / "out", shard_bytes=4000), casts=[], window_bytes=1000
    )
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.copyfile", "shutil.rmtree"}


def at_each_touch(target: Path, act: Callable[[int], None]) -> None:
    """From now on, in this process, act before whatever is done to files of the target or beside it."""
    count, busy = 0, False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count, busy
        named = [os.fsdecode(each) for each in args if isinstance(each, str | bytes | Path)]
        if busy or event not in TOUCHES or not any(name.startswith(str(target)) or "/" not in name for name in named):
            return
        busy = True
        act(count)
        count, busy = count + 1, False

    sys.addaudithook(hook)


def keep_states(rank: Rank, source: Path, target: Path, states: Path, *, exchanging: bool) -> int:
    """Reshape; before every touch keep a copy of the target and what is beside it: what a crash there would leave."""
    taken = []

    def keep(number: int) -> None:
        for path in target.parent.glob(f"{target.name}*"):
            shutil.copytree(path, states / str(number) / path.name)
        taken.append(number)

    if not exchanging:
        staging.exchange = lambda one, other: False  # type: ignore[assignment]
    at_each_touch(target, keep)
    reshape(source, Export.like(source, target, layout="tp=2", shard_bytes=400), casts=[], window_bytes=1 << 20)
    return len(taken)


def end_at(rank: Rank, source: Path, target: Path, at: int) -> None:
    """Reshape, and end without a word before the given touch."""
    at_each_touch(target, lambda number: os._exit(9) if number == at else None)
    reshape(source, Export.like(source, target, layout="tp=2", shard_bytes=400), casts=[], window_bytes=1 << 20)


def is_version(target: Path, version: int) -> bool:
    """Whether a directory is all of a version, cut for two ranks, with its index."""
    for rank in range(2):
        found = read(target / f"rank-{rank}")
        parts = {name: bits(name, shape, version)[oracle(name, shape, rank, 2)] for name, shape in SHAPES.items()}
        if found.keys() != parts.keys() or any(judge.compare(found[name], parts[name]) for name in parts):
            return False
    return (target / RECORD).is_file() and (target / "config.json").is_file()


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two sources, and a target that has the first."""
    old, new, target = write(tmp_path / "old", values(1)), write(tmp_path / "new", values(2)), tmp_path / "at" / "out"
    target.parent.mkdir()
    reshape(old, Export.like(old, target, layout="tp=2"), casts=[], window_bytes=1 << 20)
    assert is_version(target, 1)
    return old, new, target


def mend(new: Path, target: Path) -> None:
    """The next export after a crash: it ends well, and nothing is left."""
    reshape(new, Export.like(new, target, layout="tp=2"), casts=[], window_bytes=1 << 20)
    assert is_version(target, 2)
    gc.collect()
    assert left(target) == []


@pytest.mark.parametrize("exchanging", [True, False], ids=["exchanged in one step", "in two steps"])
def test_a_crash_at_any_file_loses_nothing(tmp_path: Path, versions: tuple[Path, Path, Path], exchanging: bool) -> None:
    _, new, target = versions
    states = tmp_path / "states"
    with running([(_keep_states, (new, target, states, exchanging))]) as (process,):
        count = process.result()
    found = []
    for number in range(count):
        left_over = states / str(number) / "out"
        where = left_over if left_over.exists() else left_over.with_name("out.previous")
        assert exchanging <= left_over.exists()
        found.append((is_version(where, 1), is_version(where, 2)))
    assert count > 20
    assert set(found) == {(True, False), (False, True)}
    seen = set()
    for number in range(count):
        tree = tuple(sorted(str(path.relative_to(states / str(number))) for path in (states / str(number)).rglob("*")))
        if tree not in seen and (number % 4 == 0 or len(tree) < 12 or not (states / str(number) / "out").exists()):
            mend(new, states / str(number) / "out")
        seen.add(tree)


def _keep_states(rank: Rank, source: Path, target: Path, states: Path, exchanging: bool) -> int:
    return keep_states(rank, source, target, states, exchanging=exchanging)


@pytest.mark.parametrize("at", [5, 25])
def test_a_process_that_ends_early_leaves_the_old_checkpoint(versions: tuple[Path, Path, Path], at: int) -> None:
    _, new, target = versions
    with running([(end_at, (new, target, at))]) as (process,):
        process.process.join(30)
        assert process.process.exitcode == 9
    assert is_version(target, 1)
    mend(new, target)


def test_the_next_run_puts_the_old_checkpoint_back_before_it_writes(versions: tuple[Path, Path, Path]) -> None:
    _, new, target = versions
    target.rename(target.with_name("out.previous"))
    begun = staging.Staging(Export.like(new, target, layout="tp=2"), rank=0, size=1)
    opened = [descriptor for _, descriptor in begun.create()]
    assert is_version(target, 1)
    for descriptor in opened:
        os.close(descriptor)
    begun.discard()
    assert left(target) == []


def test_a_rank_that_leaves_while_the_first_publishes_takes_nothing_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have confirmed. The first looks through `D.writing`, and the other removes what is empty there meanwhile."""
    source, target = write(tmp_path / "new", values(1)), tmp_path / "out"
    ranks = [staging.Staging(Export.like(source, target, layout="tp=2"), rank=rank, size=2) for rank in (0, 1)]
    for rank in ranks:
        for file, descriptor in list(rank.create()):
            rank.seal(file, descriptor)
            os.close(descriptor)
        rank.seal_all(version=1)
    real, once = os.scandir, []

    def scandir(path: Any = ".") -> Any:
        with real(path) as opened:
            found = list(opened)
        if "writing" in str(path) and not once:
            once.append(path)
            ranks[1].discard()
        return _Scanned(found)

    monkeypatch.setattr(os, "scandir", scandir)
    ranks[0].publish(version=1)
    assert once
    assert left(target) == []
    assert (target / RECORD).is_file()


class _Scanned(list[Any]):
    """What `os.scandir` gives: entries that are gone through once, and closed."""

    def __next__(self) -> Any:
        if not self:
            raise StopIteration
        return self.pop(0)

    def __iter__(self) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


@pytest.mark.parametrize("first", [0, 1])
def test_two_ranks_that_leave_at_once_both_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    source, target = write(tmp_path / "new", values(1)), tmp_path / "out"
    ranks = [staging.Staging(Export.like(source, target, layout="tp=2"), rank=rank, size=2) for rank in (0, 1)]
    for rank in ranks:
        for _, descriptor in list(rank.create()):
            os.close(descriptor)
    real, once = os.listdir, []

    def listdir(path: Any = ".") -> list[str]:
        if "writing" in str(path) and not once:
            once.append(path)
            ranks[1 - first].discard()
        return real(path)

    monkeypatch.setattr(staging.os, "listdir", listdir)
    ranks[first].discard()
    assert once
    assert left(target) == []


def test_a_folder_that_another_rank_removes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between making a folder and making a file in it, a rank that leaves removes the folder, as it's empty."""
    source, target = write(tmp_path / "new", values(1)), tmp_path / "out"
    begun = staging.Staging(Export.like(source, target, layout="tp=2"), rank=0, size=1)
    real, removed = os.open, []

    def open_late(path: Any, *args: Any, **more: Any) -> int:
        folder = Path(path).parent
        if folder.name.startswith("rank-") and not removed:
            removed.append(folder)
            folder.rmdir()
        return real(path, *args, **more)

    monkeypatch.setattr(staging.os, "open", open_late)
    for _, descriptor in list(begun.create()):
        os.close(descriptor)
    assert removed
    begun.discard()


def measure(rank: Rank, folder: Path, number: int, where: str) -> int:
    """A source that keeps its pages; how many bytes of the file were read into this process."""
    from refit_adapters.safetensors import SafetensorsSource

    SafetensorsSource.trim = lambda self: None  # type: ignore[method-assign]
    with RefitSession.source(folder, rendezvous=where, rank=number, size=2, deadline=20) as session:
        rank.meet("ready")
        session.push(version=1)
        text = Path("/proc/self/smaps").read_text()
    parts = re.findall(rf"{re.escape(str(folder))}[^\n]*\n(?:[^\n]*\n)*?Rss:\s+(\d+) kB", text)
    return sum(int(part) for part in parts) * 1024


def swallow(rank: Rank, number: int, where: str) -> None:
    """A target of a large tensor."""
    tensors = {"w": torch.zeros(4096, 1024)}
    with RefitSession.target(tensors, engine="e", rendezvous=where, rank=number, size=1, deadline=20) as session:
        rank.meet("ready")
        session.receive()


def test_a_rank_reads_what_it_sends(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", {"w": torch.ones(4096, 1024)})
    where = free_rendezvous()
    jobs: Any = [*((measure, (folder, n, where)) for n in range(2)), (swallow, (0, where))]
    with running(jobs) as working:
        meet(working, "ready")
        read = [rank.result() for rank in working[:2]]
        working[2].result()
    shares = [nbytes / (4096 * 1024 * 4) for nbytes in read]
    assert all(0.4 < share < 0.75 for share in shares), shares


ODD = {"model.layers.0.mlp.router.w": (6, 2), "model.layers.0.mlp.up_proj.weight": (7, 2), "lm_head.weight": (7, 2)}


def test_what_no_rule_cuts_is_refused_and_a_rule_helps(tmp_path: Path) -> None:
    source = write(tmp_path / "in", values(1, ODD))
    with pytest.raises(
        LayoutError, match=r"(?s)router.w: no rule says.*up_proj.weight: 7 rows can't be shared out to 2"
    ):
        Export.like(source, tmp_path / "out", layout="tp=2")
    rules = [("*.router.w", "1"), ("*.up_proj.*", "whole")]
    made = Export.like(source, tmp_path / "out", layout="tp=2", rules=rules)
    assert {held.name: held.box for held in made.files()[1].tensors} == {
        "model.layers.0.mlp.router.w": Box((0, 1), (6, 2)), "model.layers.0.mlp.up_proj.weight": Box((0, 0), (7, 2)),
        "lm_head.weight": Box((4, 0), (7, 2)),
    }  # fmt: skip


REFUSED: dict[str, tuple[list[str], str]] = {
    "no source": (["--from", "{tmp}/none", "--to", "{tmp}/out"], "no such directory"),
    "no layout": (["--from", "{tmp}/in", "--to", "{tmp}/out", "--target-layout", "pp=2"], "'pp=2' is not a layout"),
    "no heads": (["--from", "{tmp}/bare", "--to", "{tmp}/out", "--target-layout", "tp=2"], "nothing of heads"),
    "no dtype": (["--from", "{tmp}/in", "--to", "{tmp}/out", "--dtype", "int8"], "isn't one to cast to"),
    "a target that isn't ours": (["--from", "{tmp}/in", "--to", "{tmp}/mine"], "it has diary.txt, which"),
    "a target that is a file": (["--from", "{tmp}/in", "--to", "{tmp}/file"], "not a directory"),
    "a size": (["--from", "{tmp}/in", "--to", "{tmp}/out", "--max-shard-size", "5XB"], "is not a size"),
    "a rule": (["--from", "{tmp}/in", "--to", "{tmp}/out", "--cut", "x"], "is not a rule"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_the_command_refuses(tmp_path: Path, what: str) -> None:
    write(tmp_path / "in", values(1))
    (write(tmp_path / "bare", values(1)) / "config.json").unlink()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    arguments, told = REFUSED[what]
    result = CliRunner().invoke(app, ["push", *(argument.format(tmp=tmp_path) for argument in arguments)])
    assert (result.exit_code, told in " ".join(result.output.split())) == (2, True), result.output
    gc.collect()
    assert sorted(tmp_path.rglob("*")) == before


def test_files_put_beside_an_export_are_not_lost(tmp_path: Path) -> None:
    source = write(tmp_path / "in", values(1))
    made = Export.like(source, tmp_path / "out")
    reshape(source, made, casts=[], window_bytes=1000)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt, which no export wrote"):
        reshape(source, made, casts=[], window_bytes=1000)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_a_full_disk_shows_before_anything_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in", values(1))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(staging.os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r"can be written:\n.*No space left"):
        reshape(source, Export.like(source, tmp_path / "out"), casts=[], window_bytes=1000)
    gc.collect()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_directory_cut_short_between_pushes_is_refused(tmp_path: Path) -> None:
    from refit_adapters.safetensors import SafetensorsSource

    folder = write(tmp_path / "in", values(1))
    adapter = SafetensorsSource(folder, rank=0, size=1)
    adapter.describe()
    before = adapter.identity()
    data = (folder / SINGLE).read_bytes()
    (folder / "shorter").write_bytes(data[:-8])
    (folder / "shorter").replace(folder / SINGLE)
    assert adapter.identity() != before
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        adapter.describe()


def test_a_path_as_target_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"pass refit_sdk\.exporting\.Export\.like"):
        RefitSession.target(tmp_path, engine="e", rendezvous="tcp://127.0.0.1:1", rank=0, size=1)


def test_every_tensor_is_aligned_to_its_elements(tmp_path: Path) -> None:
    dtypes = ["int8", "float64", "bfloat16", "float32", "bool"]
    tensors = {f"{number}.{dtype}": Wanted((3,), dtype) for number, dtype in enumerate(dtypes)}
    (file,) = Export(directory=tmp_path, tensors=tensors).files()
    assert len(file.tensors) == 5
    assert [held.name for held in file.tensors if held.begin % (held.nbytes // 3)] == []


def test_nothing_of_an_export_may_be_frozen(tmp_path: Path) -> None:
    export = Export(directory=tmp_path / "out", tensors={"w": Wanted((2,), "float32")})
    with pytest.raises(LayoutError, match=r"can't leave w frozen"):
        RefitSession.target(
            export, engine="e", rendezvous="tcp://127.0.0.1:1", rank=0, size=1, frozen=["w"], deadline=1
        )
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_windows_up_to_the_last(tmp_path: Path) -> None:
    source = write(tmp_path / "in", values(1))
    seen: list[tuple[int, int]] = []
    watch = lambda done, total: seen.append((done, total))  # noqa: E731
    report = reshape(source, Export.like(source, tmp_path / "out"), casts=[], window_bytes=100, progress=watch)
    assert [done for done, _ in seen] == list(range(report.windows + 1))
    assert {total for _, total in seen} == {report.windows}
    assert report.windows > 5
