"""A coordinator that tests talk with, message by message, and five ranks: two sources, two of `a`, one of `b`."""

from __future__ import annotations

from typing import Any

from attrs import define, field

from refit_sdk import __version__, messages
from refit_sdk import manifest as wire
from refit_sdk.coordinator import Coordinator
from refit_sdk.messages import Claim, Done, EngineDone, Hello, Linked, Message, Planned, Ready
from refit_sdk.states import SessionState
from refit_sdk.world import Manifest

EMPTY = wire.encode(Manifest(()))
NAMES = {"source[0]": ("source", "", 0, 2), "source[1]": ("source", "", 1, 2)}
NAMES |= {"a[0]": ("target", "a", 0, 2), "a[1]": ("target", "a", 1, 2), "b[0]": ("target", "b", 0, 1)}
FINE, WROTE = EngineDone(1, 1), EngineDone(1, 1, "it failed", mutated=True)


def hello(name: str, **about: Any) -> Hello:
    source = name.startswith("source")
    said: dict[str, Any] = {
        "sdk": __version__,
        "claims": (Claim(*NAMES[name]),),
        "manifests": (EMPTY,),
        "settings": "{}" if source else None,
        "plugins": {"gloo": "1"},
        "engines": None,
        "pid": 7,
        "host": "here",
    }
    return Hello(**{**said, **about})


@define
class Talk:
    """A coordinator, and what it said to each rank. Ranks are links by name; a new process gets a new link."""

    hub: Coordinator = field(
        factory=lambda: Coordinator(engines=("a", "b"), deadline=10.0, heartbeat=2.0, now=0.0, hosted_by="source[0]")
    )
    links: dict[str, int] = field(factory=dict)
    heard: dict[str, list[Message]] = field(factory=dict)
    now: float = 0.0

    def take(self, sent: list[tuple[int, Message]]) -> None:
        names = {link: name for name, link in self.links.items()}
        for link, message in sent:
            self.heard[names[link]].append(message)

    def up(self, name: str, message: Any) -> None:
        self.take(self.hub.receive(self.links[name], message, now=self.now))

    def enter(self, name: str, **about: Any) -> Message:
        """A new process says hello; the answer."""
        self.links[name] = max(self.links.values(), default=0) + 1
        self.heard[name] = []
        self.up(name, hello(name, **about))
        return self.heard[name][0]

    def lose(self, name: str, cause: str = "it is gone") -> None:
        self.take(self.hub.lost(self.links[name], cause, now=self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.hub.tick(now=self.now))

    def last(self, name: str) -> Any:
        return self.heard[name][-1]

    def kinds(self, name: str) -> list[str]:
        return [type(message).__name__ for message in self.heard[name]]

    def form(self, *names: str) -> None:
        """These ranks plan and connect the epoch that was called for."""
        for name in names:
            self.up(name, Planned(epoch=self.hub.epoch, input_digest="i", plan_digest="p"))
        for name in names:
            self.up(name, Linked(epoch=self.hub.epoch))

    def word(self, *names: str) -> None:
        """These ranks give their word for an epoch that stands."""
        for name in names:
            self.up(name, Linked(epoch=self.hub.epoch))

    def ready(self, *names: str, kind: str = "push", version: int = 1, require: int = 0, word: bool = True) -> None:
        """These ranks enter a push or a reform, and give their word if they are asked for it at once."""
        for name in names:
            own = version if name.startswith("source") and kind == "push" else None
            self.up(name, Ready(kind=kind, manifests=(None,), version=own, require=require))  # type: ignore[arg-type]
        if word:
            self.word(*(name for name in names if isinstance(self.last(name), messages.Link)))

    def done(self, said: EngineDone, *names: str) -> None:
        assert self.hub.push is not None
        number, engines = self.hub.push.number, list(self.hub.push.parts)
        for name in names:
            mine = engines if name.startswith("source") else [name[0]]
            self.up(name, Done(push=number, engines=dict.fromkeys(mine, said)))

    def push(self, version: int, *names: str, said: EngineDone = FINE) -> None:
        """A whole push of an epoch that stands."""
        self.ready(*names, version=version)
        self.done(said, *names)


EVERYBODY = tuple(NAMES)


def joined() -> Talk:
    """Everybody has joined; nothing was pushed."""
    made = Talk()
    for name in EVERYBODY:
        made.enter(name)
    made.form(*EVERYBODY)
    assert made.hub.state is SessionState.IDLE
    return made
