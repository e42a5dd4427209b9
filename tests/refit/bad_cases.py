"""What ranks do in `test_bad_input`: join, push or receive, and tell what was raised and what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from attrs import field, frozen

from refit_sdk import joining, participant
from refit_sdk.errors import RefitError, SessionClosed
from refit_sdk.session import RefitSession
from refit_sdk.testing.models import Held, Model
from refit_sdk.testing.ranks import Rank

Holds = tuple[Held, ...]


@frozen
class Said:
    """What a rank has to say of one attempt: the error's class (nothing if all went well), its text and attributes, and
    what is wrong with its views (written though nothing may move, or not what was pushed).
    """

    kind: str
    text: str = ""
    faults: tuple[str, ...] = ()
    engines: dict[str, str] = field(factory=dict)
    details: Any = None


def said_of(error: RefitError, model: Model) -> Said:
    """An error, and what it left of a model that was poisoned before."""
    names = ("violations", "plugin", "transport")
    details = next((getattr(error, name) for name in names if hasattr(error, name)), None)
    engines = getattr(error, "engines", {})
    return Said(type(error).__name__, str(error), tuple(model.untouched()), engines, details)


@frozen(kw_only=True)
class Seat:
    """A rank to be: its side, what it holds, its number, and further arguments of the session."""

    side: Literal["source", "target"]
    held: Holds
    rank: int = 0
    size: int = 1
    options: dict[str, Any] = field(factory=dict)
    sdk: str = ""
    plugins: dict[str, str] = field(factory=dict)

    def join(self, model: Any, where: str) -> RefitSession:
        """Open the session."""
        given: dict[str, Any] = {"rendezvous": where, "rank": self.rank, "size": self.size, "deadline": 20}
        given |= self.options
        if self.side == "source":
            return RefitSession.source(model, **given)
        return RefitSession.target(model, **{"engine": "rollout-0", **given})


def seats(side: Literal["source", "target"], ranks: Sequence[Holds], **options: Any) -> list[Seat]:
    """A whole side."""
    return [Seat(side=side, held=held, rank=rank, size=len(ranks), options=options) for rank, held in enumerate(ranks)]


@contextmanager
def _as_if(seat: Seat) -> Iterator[None]:
    """As if another release, or other plug-ins, were installed in this process."""
    version, plugins = participant.__version__, joining._plugins
    participant.__version__ = seat.sdk or version
    joining._plugins = (lambda _: seat.plugins) if seat.plugins else plugins
    try:
        yield
    finally:
        participant.__version__, joining._plugins = version, plugins


def join(_: Rank, seat: Seat, where: str) -> Said:
    """Join, and leave at once if that goes well."""
    model = Model(seat.held)
    try:
        with _as_if(seat):
            seat.join(model, where).close()
    except RefitError as error:
        return said_of(error, model)
    return Said("", faults=tuple(model.untouched()))


@frozen(kw_only=True)
class Push:
    """One push of a source: its version; what the rank holds from now on; the view whose first value is a number."""

    version: int
    held: Holds | None = None
    number: tuple[int, float] | None = None


def gives(rank: Rank, seat: Seat, where: str, pushes: Sequence[Push]) -> list[Said]:
    """Push after push. Every rank meets the others before each."""
    model, found = Model(seat.held), []
    with seat.join(model, where) as session:
        for push in pushes:
            rank.meet("next")
            if push.held is not None:
                model.rebind(push.held)
            model.fill(version=push.version)
            if push.number is not None:
                view, number = push.number
                model.fragments[view].view.view(-1)[0] = number
            try:
                session.push(version=push.version)
                found.append(Said(""))
            except RefitError as error:
                found.append(Said(type(error).__name__, str(error), (), getattr(error, "engines", {})))
        rank.meet("last")
    return found


def takes(
    rank: Rank, seat: Seat, where: str, dtypes: dict[str, str], rebind: dict[int, Holds], times: int
) -> list[Said]:
    """Take `times` pushes. `rebind` says what the rank holds from which one on."""
    model, found = Model(seat.held), []
    with seat.join(model, where) as session:
        for number in range(times):
            if number in rebind:
                model.rebind(rebind[number])
            model.poison()
            rank.meet("next")
            try:
                report = session.receive()
                found.append(Said("", str(report.version), tuple(model.faults(version=report.version, source=dtypes))))
            except SessionClosed:
                raise
            except RefitError as error:
                found.append(said_of(error, model))
        rank.meet("last")
    return found


class Rebinding(Model):
    """A target whose installing rebinds what it holds, once."""

    def refit_install(self, *, version: int) -> None:
        """Called by the adapter when all bytes have arrived."""
        if version == 1:
            self.rebind(self.held)


def takes_rebinding(_: Rank, seat: Seat, where: str) -> list[Any]:
    """Take a push during which a tensor is rebound, and one more."""
    model, found = Rebinding(seat.held), []
    with seat.join(model, where) as session:
        for _number in range(2):
            try:
                report = session.receive()
                found.append(("", tuple(model.faults(version=report.version))))
            except RefitError as error:
                found.append((str(error), getattr(error, "engines", None)))
    return found


def busy(rank: Rank, seat: Seat, where: str) -> tuple[list[str], int]:
    """Push without waiting, and try everything else meanwhile; what was said, and the version in the end."""
    model, texts = Model(seat.held), []
    with seat.join(model, where) as session:
        model.fill(version=5)
        handle = session.push(version=5, wait=False)
        verbs: list[Callable[[], Any]] = [
            lambda: session.push(version=6),
            session.receive,
            session.reform,
            session.release,
        ]
        for verb in verbs:
            try:
                verb()
            except RefitError as error:
                texts.append(f"{type(error).__name__}: {error}")
        rank.meet("refused")
        report = handle.result(20)  # type: ignore[union-attr]
        assert handle.released.is_set()  # type: ignore[union-attr]
    return texts, report.version


def takes_late(rank: Rank, seat: Seat, where: str) -> tuple[int, list[str]]:
    """Take a push only when told."""
    model = Model(seat.held)
    with seat.join(model, where) as session:
        rank.meet("joined")
        report = session.receive()
        return report.version, model.faults(version=report.version)
