"""Worlds as bytes: equal manifests once, one text for one world, and nothing taken that isn't one."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.errors import RendezvousError
from refit_sdk.manifest import decode_world, encode_world, fold, world_bytes
from refit_sdk.world import Manifest, Seat, World


def held(*names: str) -> Manifest:
    return fold(Fragment(name, (4,), Box((0,), (4,)), np.zeros(4, "float32")) for name in names)


def world() -> World:
    seats = (Seat("source", "", 0, 0), Seat("source", "", 1, 1), Seat("target", "rollout-0", 0, 2))
    return World(3, seats, (held("a.0", "a.1"), held("a.1")), (0, 0, 1))


@given(st.lists(st.sampled_from([held("a"), held("a", "b"), held("layers.3.w")]), max_size=12), st.integers(0, 2**40))
def test_decode_world_undoes_encode_world(of_rank: list[Manifest], epoch: int) -> None:
    seats = tuple(Seat("source", "", rank, rank) for rank in range(len(of_rank)))
    given_world = World(epoch, seats, tuple(of_rank), tuple(range(len(of_rank))))
    found = decode_world(encode_world(given_world))
    assert (found.epoch, found.seats) == (epoch, seats)
    assert [found.manifest(seat) for seat in seats] == of_rank
    assert len(found.manifests) == len(set(of_rank))
    assert decode_world(encode_world(found)) == found


def test_the_world_s_bytes_forget_the_order_of_arrival() -> None:
    one = world()
    other = evolve(one, seats=one.seats[::-1], manifests=(*one.manifests[::-1], held("unused")), manifest_of=(0, 1, 1))
    assert world_bytes(other) == world_bytes(one)
    assert encode_world(other) == encode_world(one)


def test_equal_manifests_travel_once() -> None:
    seats = tuple(Seat("source", "", rank, rank) for rank in range(500))
    model = held(*(f"layers.{i}.w{k}" for i in range(10) for k in range(20)))
    assert len(encode_world(World(0, seats, (model,), (0,) * 500))) < 8000


def framed(raw: bytes, *, nbytes: int | None = None) -> bytes:
    return struct.pack(">8sQ", b"refit-w1", len(raw) if nbytes is None else nbytes) + zlib.compress(raw)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(b"", "begin with b''", id="nothing"),
        pytest.param(b"x" * 100, "begin with b'xxxxxxxx'", id="something else"),
        pytest.param(
            b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x06system\x93.", "begin with", id="a pickle"
        ),
        pytest.param(encode_world(world())[:12], "begin with", id="half a header"),
        pytest.param(encode_world(world())[:-8], "cut off", id="truncated"),
        pytest.param(encode_world(world()) + b"more", "has more", id="something after it"),
        pytest.param(encode_world(world())[:16] + b"not zlib", "damaged", id="not zlib"),
        pytest.param(framed(b"{}", nbytes=1), "has more", id="longer than announced"),
        pytest.param(framed(b"{}", nbytes=3), "has 2", id="shorter than announced"),
        pytest.param(framed(b"{}", nbytes=2**63), "announce 9223372036854775808", id="announces too much"),
        pytest.param(framed(b"{}"), "aren't one", id="no fields"),
        pytest.param(
            framed(world_bytes(world()).replace(b'"epoch"', b'"epoch":3,"epoch"')), "canonical", id="a field twice"
        ),
        pytest.param(framed(world_bytes(world()).replace(b'"rank":1', b'"rank":-1')), "`int` >= 0", id="negative rank"),
        pytest.param(
            framed(world_bytes(world()).replace(b'"target"', b'"victim"')), "Invalid enum value", id="no such side"
        ),
        pytest.param(
            framed(world_bytes(world()).replace(b'"rank":1', b'"rank":0')), "2 processes take", id="a rank twice"
        ),
        pytest.param(framed(world_bytes(world()).replace(b'"rollout-0"', b'""')), "targets have one", id="no engine"),
        pytest.param(
            framed(world_bytes(world()).replace(b"[0,0,1],", b"[0,0],")), "manifests for 2", id="too few manifests"
        ),
        pytest.param(
            framed(world_bytes(world()).replace(b"[0,0,1],", b"[0,0,2],")), "isn't there", id="no such manifest"
        ),
        pytest.param(framed(world_bytes(world()).replace(b"[0,0,1],", b"[0,0,0],")), "canonical", id="unused manifest"),
        pytest.param(
            framed(world_bytes(world()).replace(b"float32", b"float31")), "no rank can have", id="wrong manifest"
        ),
    ],
)
def test_decode_world_refuses(data: bytes, says: str) -> None:
    with pytest.raises(RendezvousError, match=says):
        decode_world(data)


def test_a_zip_bomb_is_refused_before_it_grows() -> None:
    bomb = framed(bytes(64 << 20), nbytes=1000)
    tracemalloc.start()
    with pytest.raises(RendezvousError, match="announces 1000 bytes and has more"):
        decode_world(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param({"manifest_of": (0, 0)}, "manifests for 2", id="a seat without a manifest"),
        pytest.param({"manifest_of": (0, 0, -1)}, "isn't there", id="a number below zero"),
        pytest.param({"seats": (Seat("source", "", 0, 0),) * 3}, "3 processes take the seat", id="a seat three times"),
    ],
)
def test_encode_world_refuses(change: dict[str, Any], says: str) -> None:
    with pytest.raises(RendezvousError, match=says):
        encode_world(evolve(world(), **change))
