"""Engines led through pushes, by controls that write down what they hear: who is paused, finished, resumed, fenced."""

from collections.abc import Mapping
from typing import Any

import pytest

from refit_sdk.driving import DrivenEngine, Driver, split
from refit_sdk.errors import PushError, RefitError
from refit_sdk.report import EngineReport, PushReport


class Logbook:
    """A fake engine's control: it keeps what it's told, and fails at the verbs it's asked to fail at."""

    name = "test-only-logbook"

    def __init__(self, engine: str, *, failing: str = "") -> None:
        self.engine = engine
        self.failing = failing
        self.heard: list[str] = []
        self.commits = 3

    def _hear(self, verb: str) -> None:
        self.heard.append(verb)
        if verb == self.failing:
            raise RuntimeError(f"{verb} doesn't work today")

    def check(self) -> None:
        self._hear("check")

    def connect(self, *, info: Mapping[str, Any]) -> None:
        self.info = dict(info)
        self._hear("connect")

    def disconnect(self) -> None:
        self._hear("disconnect")

    def pause(self, *, mode: str) -> None:
        self._hear(f"pause {mode}")

    def pause_now(self) -> None:
        self._hear("pause")

    def update(self, *, version: int, info: Mapping[str, Any]) -> None:
        self._hear(f"update {version}")

    def finish(self, *, version: int) -> None:
        self._hear(f"finish {version}")

    def refresh_caches(self) -> None:
        self._hear("caches")

    def resume(self) -> None:
        self._hear("resume")

    def fence(self, reason: str) -> None:
        self._hear("fence")


SERVED = ["pause", "update 3", "finish 3", "caches", "resume"]


def report(*engines: str) -> PushReport:
    return PushReport(3, {"move": 1.0}, {}, {name: EngineReport("complete", 3, "") for name in engines}, 1)


def pushed(*engines: Logbook, error: Exception | None = None, require: int = 0) -> PushReport:
    driver = Driver(engines, info={})
    driver.served = lambda: {engine.engine: engine.commits for engine in engines}

    def push() -> PushReport:
        driver.enter()
        if error is not None:
            raise error
        return report(*(engine.engine for engine in engines))

    return driver.push(push, version=3, require=require, seconds=5)


def test_a_control_is_known_by_its_verbs() -> None:
    engine = Logbook("b")
    assert isinstance(engine, DrivenEngine)
    assert split(["a", engine]) == (("a", "b"), (engine,))
    with pytest.raises(RefitError, match="names b more than once"):
        split(["b", engine])


def test_engines_that_take_part_go_through_all_stages_which_are_timed() -> None:
    engines = [Logbook("a"), Logbook("b")]
    found = pushed(*engines)
    assert [engine.heard for engine in engines] == [SERVED, SERVED]
    assert found.seconds.keys() == {"move", "pause", "finish", "caches", "resume"}


def test_an_engine_that_cant_be_paused_lets_the_others_serve_and_touches_nothing() -> None:
    good, bad = Logbook("a"), Logbook("b", failing="pause")
    with pytest.raises(RefitError, match="engine b can't be paused for the push: pause doesn't work today"):
        pushed(good, bad)
    assert good.heard == ["pause", "resume"]
    assert bad.heard == ["pause"]


@pytest.mark.parametrize("verb", ["update 3", "finish 3", "caches", "resume"])
def test_an_engine_that_fails_stays_paused_and_the_error_says_how_to_recover(verb: str) -> None:
    good, bad = Logbook("a"), Logbook("b", failing=verb)
    with pytest.raises(
        PushError, match=r"b: .* doesn't work today.*b: it stays paused and fenced; push again"
    ) as caught:
        pushed(good, bad)
    assert caught.value.engines == {"b": "in doubt"}
    assert good.heard == SERVED
    assert bad.heard[-1] == "fence"
    assert verb in ("resume", bad.heard[-2])


def test_an_engine_that_the_rendezvous_knows_not_to_have_committed_is_fenced() -> None:
    good, torn = Logbook("a"), Logbook("b")
    torn.commits = 2
    with pytest.raises(PushError, match="engine b: it didn't commit version 3; b: it stays paused and fenced"):
        pushed(good, torn)
    assert good.heard == SERVED
    assert torn.heard == ["pause", "update 3", "fence"]


def test_enough_engines_may_be_enough() -> None:
    good, bad = Logbook("a"), Logbook("b", failing="update 3")
    assert pushed(good, bad, require=1).version == 3
    assert bad.heard == ["pause", "update 3", "fence"]


def test_what_the_push_says_comes_first_and_its_engines_states_stay() -> None:
    good, bad = Logbook("a"), Logbook("b", failing="update 3")
    error = PushError("source[1] hung up", failures={"source[1]": "hung up"}, engines={"a": "complete", "b": "torn"})
    with pytest.raises(PushError, match=r"^source.1. hung up; b: it stays paused and fenced") as caught:
        pushed(good, bad, error=error)
    assert caught.value.engines == {"a": "complete", "b": "torn"}
    assert good.heard == SERVED


def test_a_fenced_engine_is_not_resumed_because_another_cant_be_paused() -> None:
    good, bad = Logbook("a"), Logbook("b", failing="update 3")
    driver = Driver([good, bad], info={})
    driver.served = lambda: {"a": 3, "b": 3}
    with pytest.raises(PushError):
        driver.push(lambda: (driver.enter(), report())[1], version=3, require=0, seconds=5)
    good.failing, bad.failing = "pause", ""
    with pytest.raises(RefitError, match="engine a can't be paused"):
        driver.push(lambda: (driver.enter(), report())[1], version=4, require=0, seconds=5)
    assert bad.heard == ["pause", "update 3", "fence", "pause"]


def test_engines_are_told_where_to_join_and_who_they_are_and_no_secret() -> None:
    engine = Logbook("a")
    driver = Driver([engine], info={"rendezvous": "tcp://127.0.0.1:1"})
    driver.connect()
    driver.connected(seconds=5)
    assert engine.info == {"rendezvous": "tcp://127.0.0.1:1", "engine": "a"}
    driver.close()
    assert engine.heard == ["check", "connect", "disconnect"]


def test_who_cant_take_part_or_doesnt_join_is_named() -> None:
    with pytest.raises(RefitError, match="engine a can't take part: check doesn't work today"):
        Driver([Logbook("a", failing="check")], info={}).connect()
    driver = Driver([Logbook("a", failing="connect")], info={})
    driver.connect()
    with pytest.raises(RefitError, match="engine a didn't join: connect doesn't work today"):
        driver.connected(seconds=5)
    assert driver.refused() == "a: connect doesn't work today"
