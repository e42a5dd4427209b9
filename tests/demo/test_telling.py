"""What the demo says of a push: the line, the table, the JSON and the exit code."""

from __future__ import annotations

import io
import json
import re
import socket
from collections.abc import Iterator

import attrs
import pytest
from click.testing import CliRunner
from rich.console import Console

from refit_sdk.cli.demo import demo
from refit_sdk.demo.rows import Checked, Pushed, Row, Tally
from refit_sdk.demo.run import Options, reserved_port
from refit_sdk.render.demo import carriers, document, line, table, verdict

RIGHT = Row(1, 6.2, 0.05, 0.08, 2_000_000, 5_500_000, 1_000_000, 0, 900_000, "", 0.004)
FLIPPED = attrs.evolve(RIGHT, version=2, wrong=1, first_wrong="rollout-0[1] lm_head.weight")
MISCOMPUTED = attrs.evolve(RIGHT, version=2, logits_error=0.2)
EMPTY = attrs.evolve(RIGHT, version=2, elements=0)


def text_of(*rows: Row, waiting: int = 0) -> str:
    console = Console(file=io.StringIO(), width=250)
    console.print(table(rows, title="four to two", waiting=waiting))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_right_push_is_told_in_full() -> None:
    assert line(RIGHT) == (
        "version 1: loss 6.200, 0.050 s, 0.08 GB/s, 2.00 MB moved (gather-broadcast: 5.50 MB), 90.0 % new, "
        "bits equal, logits 0.40 % off"
    )
    shown = text_of(RIGHT, waiting=2)
    assert all(cell in shown for cell in ("four to two", "2.00", "5.50", "equal", "0.40"))
    assert re.search(r"^ *3 +…", shown, re.MULTILINE)


def test_a_wrong_push_is_told_as_wrong_everywhere() -> None:
    for told in (line(FLIPPED), text_of(RIGHT, FLIPPED)):
        assert "1 of 1000000 WRONG, first in rollout-0[1] lm_head.weight" in told
    assert "logits 20.00 WRONG % off" in line(MISCOMPUTED)
    assert verdict([RIGHT, FLIPPED]) == "1 of 2 pushes did not deliver what the sources had"
    assert verdict([RIGHT]) == "1 of 1 pushes right: 1000000 target elements compared, all bit-equal to the cast source"
    by_two = attrs.evolve(RIGHT, carried=("gloo", "shm"))
    assert [carriers([RIGHT]), carriers([RIGHT, by_two])] == ["", "the bytes of source[0] went by gloo and shm"]
    told = json.loads(document([RIGHT, FLIPPED]))
    assert [told["ok"], *(push["bit_equal"] for push in told["pushes"])] == [False, True, False]


@pytest.mark.parametrize("as_json", [False, True], ids=["lines", "json"])
@pytest.mark.parametrize(
    ("rows", "code"),
    [
        pytest.param([RIGHT, attrs.evolve(RIGHT, version=2)], 0, id="right"),
        pytest.param([RIGHT, FLIPPED], 1, id="one wrong bit"),
        pytest.param([RIGHT, MISCOMPUTED], 1, id="wrong logits"),
        pytest.param([RIGHT, EMPTY], 1, id="nothing compared"),
        pytest.param([RIGHT], 1, id="a push missing"),
    ],
)
def test_the_exit_code_says_so_too(rows: list[Row], code: int, as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(options: Options) -> Iterator[Row]:
        yield from rows

    monkeypatch.setattr("refit_sdk.demo.run.run_demo", run)
    assert CliRunner().invoke(demo, ["--pushes", "2", *["--json"] * as_json]).exit_code == code


def test_a_row_waits_for_every_target() -> None:
    tally = Tally(sources=4, targets=2)
    assert tally.add("rollout-0[1]", Checked(1, 10, 0, 10, "", 0.01)) is None
    assert tally.add("source[0]", Pushed(1, 6.2, 0.1, 0.3, 80, 60)) is None
    assert tally.add("rollout-0[0]", Checked(2, 10, 0, 10, "", 0.01)) is None
    row = tally.add("rollout-0[0]", Checked(1, 12, 2, 9, "a.weight", 0.03))
    assert row == Row(1, 6.2, 0.1, 0.3, 80, 60 * 3 // 4 + 60 * 2, 22, 2, 19, "rollout-0[0] a.weight", 0.03)


def test_a_reserved_port_is_nobody_elses_and_can_be_listened_on() -> None:
    with reserved_port() as port, reserved_port() as other:
        assert port != other
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.socket() as rendezvous, socket.socket() as peer:
            rendezvous.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            rendezvous.bind(("127.0.0.1", port))
            rendezvous.listen()
            peer.connect(("127.0.0.1", port))
            rendezvous.accept()[0].close()
