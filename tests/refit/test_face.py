"""The public face: what can't be asked is refused at once and in words, and sessions end as they should."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from refit_sdk import session as face
from refit_sdk.box import Box
from refit_sdk.controller import RefitController
from refit_sdk.device import callers_streams
from refit_sdk.errors import RefitError, RendezvousError
from refit_sdk.report import EngineReport, PushReport, Traffic
from refit_sdk.session import PushHandle, RefitSession
from refit_sdk.settings import Settings
from refit_sdk.testing.models import Held, Model
from refit_sdk.testing.ranks import free_rendezvous

HELD = [Held("w", (4,), Box((0,), (4,)))]
NOWHERE = "tcp://127.0.0.1:1"
Pair = tuple[RefitSession, RefitSession]


def source(where: str = NOWHERE, **given: Any) -> RefitSession:
    model = given.pop("model", None) or Model(HELD)
    return RefitSession.source(model, **{"rendezvous": where, "rank": 0, "size": 1, "deadline": 20.0, **given})


def target(where: str = NOWHERE, **given: Any) -> RefitSession:
    options = {"rendezvous": where, "engine": "a", "rank": 0, "size": 1, "deadline": 20.0, **given}
    return RefitSession.target(Model(HELD), **options)


def colocated(where: str = NOWHERE, **given: Any) -> RefitSession:
    options = {"rendezvous": where, "rank": 0, "size": 1, "deadline": 20.0, **given}
    return RefitSession.colocated(source=Model(HELD), target=Model(HELD), **options)


def controller(**given: Any) -> RefitController:
    return RefitController(rendezvous="tcp://127.0.0.1:0", **given)


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A source and a target in this process, each with a thread to join in."""
    where = free_rendezvous()
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(source, where), pool.submit(target, where)
        gives, takes = joining[0].result(), joining[1].result()
    with takes, gives:
        yield gives, takes


Maker = Callable[..., Any]
BAD: list[tuple[tuple[Maker, ...], str, list[Any], str]] = [
    ((source, target, colocated), "rank", [True, "0", 0.0], "is not a whole number"),
    ((source, target, colocated), "size", [True, "1", 1.0], "is not a whole number"),
    ((target,), "rank", [None], "is not a whole number"),
    ((colocated,), "engine_rank", [True, "0"], "is not a whole number"),
    ((colocated,), "engine_size", [False, 1.5], "is not a whole number"),
    ((target, colocated), "engine", ["", "a b", "a/b", "a\n", 3, None], "is no name of an engine"),
    ((target, colocated), "engine", ["source"], "another name"),
    ((source, target, controller), "deadline", [0, -1, float("nan"), float("inf"), 10**400, True, "9"], "is no time"),
    ((source, colocated, controller), "heartbeat", [0, -1, float("nan"), float("inf"), True, "9"], "is no time"),
    ((source, colocated, controller), "engines", ["a"], "engines=[...]"),
    ((source, colocated, controller), "engines", [0, -1], "out of range: pass an int from 1"),
    ((source, colocated, controller), "engines", [True, False], "is not a whole number"),
    ((source, colocated, controller), "engines", [1.5], "pass how many, or a list of names"),
    ((source, colocated, controller), "engines", [[]], "names no engine"),
    ((source, colocated, controller), "engines", [["a", "b", "a"]], "names a more than once"),
    ((source, colocated, controller), "engines", [["a", 3], ["a", ""]], "is no name of an engine"),
    ((controller,), "engines", [None], "pass how many, or a list of names"),
    ((target, colocated), "frozen", ["lm_head.*"], "put it in a list, frozen="),
    ((target, colocated), "frozen", [[3]], "3 is not a string"),
    ((target, colocated), "frozen", [7], "frozen=7 is a int"),
    ((source, colocated, Settings), "ignore", ["mtp.*", b"mtp.*"], "put it in a list, ignore="),
    ((source, colocated, Settings), "ignore", [[None]], "None is not a string"),
    ((source, colocated, Settings), "routes", ["reshard"], "put it in a list, routes="),
    ((source, colocated, Settings), "routes", [["ab"], {"*": "reshard"}, [("*",)]], "a list of (pattern, transport)"),
    ((source, colocated, Settings), "casts", ["float16"], "put it in a list, casts="),
    ((source, colocated, Settings), "casts", [[("*", torch.float16)], [("*", 3)]], "pass a list of (pattern, dtype)"),
    ((source, colocated, Settings), "cast", ["sometimes", 3, []], "pass one of 'allowed', 'never'"),
    ((source, Settings), "window_bytes", [0, -1, 1 << 48], "out of range: pass an int from 1 to"),
    ((source, Settings), "window_bytes", [True, 1.5, "64"], "is not a whole number"),
    ((Settings,), "window_ops", [0, 1 << 48], "out of range: pass an int from 1 to"),
    ((Settings,), "window_ops", [True, 2.0], "is not a whole number"),
    ((Settings,), "coalesce_bytes", [-1, 1 << 48], "out of range: pass an int from 0 to"),
    ((Settings,), "coalesce_bytes", [False, 2.0], "is not a whole number"),
    ((source, target, colocated), "settings", [{"cast": "never"}], "pass Settings(...)"),
]  # fmt: skip
CASES = [
    pytest.param(make, name, value, says, id=f"{make.__name__} {name}={value!r}")
    for makers, name, values, says in BAD
    for make in makers
    for value in values
]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("something was about to be sent")

    monkeypatch.setattr(face, "join", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(("make", "name", "value", "says"), CASES)
def test_arguments_that_cannot_be(make: Maker, name: str, value: Any, says: str) -> None:
    with pytest.raises(RefitError) as caught:
        make(**{name: value})
    text = str(caught.value)
    assert name in text
    assert says in text


def test_limits_may_be_at_their_ends() -> None:
    made = Settings(window_bytes=(1 << 48) - 1, window_ops=1, coalesce_bytes=0, routes=[["*", "reshard"]])
    assert (made.window_ops, made.coalesce_bytes, made.routes) == (1, 0, (("*", "reshard"),))


VERSIONS = [True, -1, 2**63, 1.0, "1", None]
REQUIRES = [True, False, 0, -1, 1.0, "all of them", None]


@pytest.mark.parametrize("wait", [True, False])
def test_a_push_that_cannot_be_asked_for(pair: Pair, wait: bool) -> None:
    gives, takes = pair
    for version in VERSIONS:
        with pytest.raises(RefitError, match=r"^version=.*: pass an int from 0 to 9223372036854775807"):
            gives.push(version=version, wait=wait)  # type: ignore[arg-type]
    for require in REQUIRES:
        with pytest.raises(RefitError, match=r"^require=.*: pass 'all', or an int from 1 on"):
            gives.push(version=1, require=require, wait=wait)  # type: ignore[arg-type]
    assert pushed(gives, takes, version=2**63 - 1) == 2**63 - 1


def pushed(gives: RefitSession, takes: RefitSession, *, version: int) -> int:
    """The version that arrives by a push."""
    handle = gives.push(version=version, require=1, wait=False)
    assert isinstance(handle, PushHandle)
    assert takes.receive().version == version
    return handle.result(20).version


def test_verbs_of_the_other_side(pair: Pair) -> None:
    gives, takes = pair
    for wait in (True, False):
        with pytest.raises(RefitError, match=r"push\(\) .* only a target: call receive\(\)"):
            takes.push(version=1, wait=wait)
    with pytest.raises(RefitError, match=r"sync\(\) .* only a target: call receive\(\)"):
        takes.sync(version=1)
    with pytest.raises(RefitError, match=r"receive\(\) .* only a source: call push\(version=\)"):
        gives.receive()
    with pytest.raises(RefitError, match=r"sync\(\) .* only a source: call push\(version=\)"):
        gives.sync(version=1)
    assert pushed(gives, takes, version=1) == 1


def test_a_colocated_session_syncs() -> None:
    with colocated(free_rendezvous()) as session:
        with pytest.raises(RefitError, match=r"trains and generates: call sync\(version=\), not receive\(\)"):
            session.receive()
        with pytest.raises(RefitError, match=r"^version="):
            session.sync(version=False)
        assert session.sync(version=3).version == 3


def test_a_closed_session_says_so() -> None:
    session = colocated(free_rendezvous())
    session.close()
    session.close()
    verbs: list[Callable[[], object]] = [
        lambda: session.push(version=1),
        lambda: session.push(version=1, wait=False),
        session.receive,
        lambda: session.sync(version=1),
        session.reform,
        session.release,
        lambda: session.plan,
    ]
    for verb in verbs:
        with pytest.raises(RefitError, match="this session is closed"):
            verb()


def test_closing_waits_for_a_push_under_way(pair: Pair) -> None:
    gives, takes = pair
    handle = gives.push(version=5, wait=False)
    assert isinstance(handle, PushHandle)
    with pytest.raises(RefitError, match="busy with a push"):
        gives.push(version=6, wait=False)
    closing = threading.Thread(target=gives.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive(), "the engine hasn't taken it yet"
    assert takes.receive().version == 5
    closing.join(20)
    assert handle.result(0).version == 5


def test_closing_waits_no_longer_than_the_deadline() -> None:
    with controller(deadline=600) as hosting, ThreadPoolExecutor() as pool:
        joining = [pool.submit(make, hosting.rendezvous, deadline=2) for make in (source, target)]
        gives, takes = (each.result() for each in joining)
        handle = gives.push(version=5, wait=False)
        assert isinstance(handle, PushHandle)
        gives.close()
        with pytest.raises(RefitError):
            handle.result(20)
        takes.close()


def test_a_push_that_goes_on_by_itself_has_the_callers_streams(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def streams() -> Callable[[], contextlib.AbstractContextManager[None]]:
        seen.append(threading.get_ident())

        @contextlib.contextmanager
        def entered() -> Iterator[None]:
            seen.append(threading.get_ident())
            yield
            seen.append(threading.get_ident())

        return entered

    monkeypatch.setattr(face, "callers_streams", streams)
    assert pushed(*pair, version=1) == 1
    assert seen[0] == threading.get_ident()
    assert seen[1] == seen[2] != seen[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_streams_are_carried_to_another_thread() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        entered = callers_streams()

    def current() -> object:
        with entered():
            return torch.cuda.current_stream()

    with ThreadPoolExecutor() as pool:
        assert pool.submit(current).result() == stream


def test_cuda_is_not_brought_into_use() -> None:
    if not torch.cuda.is_initialized():
        with callers_streams()():
            assert not torch.cuda.is_initialized()


def test_a_controller_knows_its_engines() -> None:
    with controller(engines=["a", "b"]) as hosting:
        for verb in (hosting.drop, hosting.pause, hosting.resume):
            with pytest.raises(RefitError, match="engine 'c' is not known here; known are: a, b"):
                verb("c")
        for name in ("", "a b", "source", 3):
            with pytest.raises(RefitError, match="engine="):
                hosting.admit(name)  # type: ignore[arg-type]
        hosting.admit("c")
        assert list(hosting.engines) == ["a", "b", "c"]


def test_a_closed_controller_says_so() -> None:
    hosting = controller(engines=["a"])
    hosting.close()
    hosting.close()
    for verb in (hosting.admit, hosting.drop, hosting.pause, hosting.resume):
        with pytest.raises(RendezvousError, match="this controller is closed"):
            verb("a")


def test_a_report_is_read_at_a_glance() -> None:
    report = PushReport(
        version=17,
        seconds={"agree": 0.0021, "move": 0.3, "install": 0.1, "commit": 0.1},
        ranks={"source[0]": Traffic(10**9, 0), "a[0]": Traffic(0, 10**9)},
        engines={"a": EngineReport("complete", 17, ""), "b": EngineReport("torn", None, "b[0]: [it] is gone")},
        windows=4,
    )
    assert [" ".join(line.split()) for line in str(report).splitlines()] == [
        "version 17: 953.7 MiB sent, 953.7 MiB arrived, 4 windows, 2.000 GB/s",
        "agree 0.002 s, move 0.300 s, install 0.100 s, commit 0.100 s",
        "engine state version cause",
        "a complete 17",
        "b torn none b[0]: [it] is gone",
    ]
    assert report.__rich__().renderables
