"""Checkpoint directories: what transformers writes is read; what lies is refused before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from refit_sdk.checkpoint import INDEX, SINGLE, CheckpointError
from refit_sdk.demo.checkpoint import open_checkpoint
from refit_sdk.demo.run import Options, run_demo
from refit_sdk.demo.train import stored_values
from refit_sdk.errors import RefitError

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def single(save: Any, tmp_path: Path) -> Path:
    save("qwen3", tmp_path)
    return tmp_path


@pytest.fixture
def sharded(save: Any, tmp_path: Path) -> Path:
    save("qwen3", tmp_path, shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_file_and_many_hold_the_same(dtype: torch.dtype, save: Any, tmp_path: Path) -> None:
    save("qwen3", tmp_path / "one", dtype=dtype)
    save("qwen3", tmp_path / "many", dtype=dtype, shard_size="20KB")
    one, many = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "many")
    assert one.config == many.config
    assert one.tensors.keys() == many.tensors.keys() == one.config.parameter_shapes().keys()
    for name, shape in one.config.parameter_shapes().items():
        assert torch.equal(stored_values(one)(name, shape), stored_values(many)(name, shape))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE)


def reindex(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def truncate(directory: Path, keep: int | float) -> None:
    data = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])


SINGLE_LIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json can't be read"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "must hold an object"),
    "config of another model": (lambda d: (d / "config.json").write_text('{"model_type": "gpt2"}'), "gpt2"),
    "no weights": (lambda d: (d / SINGLE).unlink(), "neither model.safetensors nor"),
    "weights are a directory": (lambda d: ((d / SINGLE).unlink(), (d / SINGLE).mkdir()), "damaged or cut short"),
    "empty file": (lambda d: truncate(d, 0), r"0 bytes\) is damaged or cut short"),
    "header cut short": (lambda d: truncate(d, 100), r"100 bytes\) is damaged or cut short"),
    "body cut short": (lambda d: truncate(d, 0.9), "damaged or cut short"),
    "missing tensor": (lambda d: rewrite(d, lambda t: t.pop(UP)), f"{UP} is missing"),
    "unknown tensor": (lambda d: rewrite(d, lambda t: t.update(mtp=torch.ones(1))), "mtp belongs to no part"),
    "another shape": (lambda d: rewrite(d, lambda t: t.update({UP: torch.ones(32, 48)})), r"\(32, 48\).*\(48, 32\)"),
    "integers": (lambda d: rewrite(d, lambda t: t.update({UP: torch.ones(48, 32).int()})), "dtype I32"),
    "extra layer": (
        lambda d: rewrite(d, lambda t: t.update({UP.replace("1", "2"): torch.ones(48, 32)})),
        "model.layers.2.mlp.up_proj.weight belongs to no part",
    ),
}
SHARDED_LIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent file": (lambda d: next(d.glob("*-00002-of-*")).unlink(), "names model-00002-of-.* missing"),
    "wrong file": (lambda d: reindex(d, lambda m: m.update({UP: m["model.embed_tokens.weight"]})), "doesn't hold it"),
    "file elsewhere": (lambda d: reindex(d, lambda m: m.update({UP: "../x.safetensors"})), "not a file of the dir"),
    "left out": (lambda d: reindex(d, lambda m: m.pop(UP)), f"{UP} is missing"),
    "no map": (lambda d: (d / INDEX).write_text("{}"), "needs a weight_map"),
    "map of numbers": (lambda d: reindex(d, lambda m: m.update({UP: 1})), "needs a weight_map"),
}


@pytest.mark.parametrize("lie", SINGLE_LIES)
def test_a_lying_directory_is_refused(lie: str, single: Path) -> None:
    change, told = SINGLE_LIES[lie]
    change(single)
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(single)


@pytest.mark.parametrize("lie", SHARDED_LIES)
def test_a_lying_index_is_refused(lie: str, sharded: Path) -> None:
    change, told = SHARDED_LIES[lie]
    change(sharded)
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(sharded)


def test_every_problem_is_listed(single: Path) -> None:
    rewrite(single, lambda t: (t.pop(UP), t.update(mtp=torch.ones(1))))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(single)
    assert len(caught.value.problems) == 2


def test_a_tied_head_that_differs_is_refused(save: Any, tmp_path: Path) -> None:
    save("qwen3-tied", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert stored_values(open_checkpoint(tmp_path))
    rewrite(tmp_path, lambda t: t["lm_head.weight"][0, 0].add_(1))
    with pytest.raises(CheckpointError, match=r"ties lm_head\.weight"):
        stored_values(open_checkpoint(tmp_path))


def test_old_rotary_tables_are_passed_over(single: Path) -> None:
    rewrite(single, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert UP in open_checkpoint(single).tensors


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sources": 0}, "'sources': 0"),
        ({"targets": -1, "pushes": 0}, "'targets': -1, 'pushes': 0"),
        ({"size": "huge"}, "one of tiny, small, medium"),
        ({"checkpoint": Path("x"), "tied": True}, "brings its own size"),
        ({"checkpoint": Path("/nowhere")}, "no such directory"),
        ({"size": "tiny", "targets": 3}, "one of 1, 2, 4"),
    ],
)
def test_options_are_refused_before_anything_starts(
    options: dict[str, object], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("refit_sdk.demo.run.Crew")
    with pytest.raises(RefitError, match=told):
        next(run_demo(Options(**options)))  # type: ignore[arg-type]
