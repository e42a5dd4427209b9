"""The control channel's messages: one schema for both directions, checked on arrival. Nothing received is executed.

`Up` goes from a process to the rendezvous, `Down` comes back. Names of ranks are those of `str(Seat)`: `source[0]`,
`rollout-0[1]`.

>>> decode_up(encode(Linked(epoch=3)))
Linked(epoch=3, sums=())
>>> decode_up(b"junk")
Traceback (most recent call last):
...
refit_sdk.errors.RendezvousError: a control message that doesn't fit the schema arrived: Expected `object`, got `int`
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from refit_sdk.errors import RendezvousError
from refit_sdk.world import Seat, Side


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """The base of all messages: a tagged, closed record."""


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A seat that a process asks for: rank `rank` of the `size` ranks of its side or engine."""

    side: Side
    engine: str
    rank: int
    size: int

    def __str__(self) -> str:
        return str(Seat(self.side, self.engine, self.rank))


class Door(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the others of a host come for the world: its Unix socket, and the key that they show there.

    `host` is what processes of one host have in common.
    """

    host: str
    name: str
    key: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a process says it is; `domain` is "" where it knows of none but its host."""

    host: str = ""
    domain: str = ""


class EngineDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank has to say of one engine after moving: bytes by completions, and how it failed, if it did.

    `lost` names the rank at the other end, where that one is said to be the cause.
    """

    sent: int
    arrived: int
    cause: str = ""
    mutated: bool = False
    lost: str = ""


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine after a push: untouched, complete, in doubt or torn; the version that it serves; the first cause."""

    state: str
    version: int | None
    cause: str = ""


class Hello(Message, frozen=True):
    """Asks for seats. `settings` is canonical JSON (None: what the sources say); `manifests` has one body a seat;
    `fabric` is the name of what this process moves bytes by; `frozen` maps each pattern of tensors that pushes leave
    alone to None if this process holds one, else to the nearest name that it holds. `door` is for others of its host;
    `where` is for planning.
    """

    sdk: str
    claims: tuple[Claim, ...]
    manifests: tuple[bytes, ...]
    settings: str | None
    plugins: dict[str, str]
    engines: int | tuple[str, ...] | None
    pid: int
    host: str
    fabric: str = ""
    frozen: dict[str, str | None] = {}
    door: Door | None = None
    where: Where = Where()


class Unable(Message, frozen=True):
    """This process can't ask for its seats: what it was given can't be described, or used. `reason` says why."""

    claims: tuple[Claim, ...]
    reason: str


class Ready(Message, frozen=True):
    """This process has entered `push`, `receive` or `reform`. A manifest is sent only where it changed.

    `version` and `require` (0: all) are a source's.
    """

    kind: Literal["push", "reform"]
    manifests: tuple[bytes | None, ...]
    version: int | None = None
    require: int = 0


class Unready(Message, frozen=True):
    """This process was called to enter `push`, `receive` or `reform`, and couldn't: its model isn't ready, or can't be
    described any more. `version` is a source's.
    """

    kind: Literal["push", "reform"]
    cause: str
    version: int | None = None


class Planned(Message, frozen=True):
    """This process has planned the epoch; the digests must be equal on all."""

    epoch: int
    input_digest: str
    plan_digest: str


class Linked(Message, frozen=True):
    """This process has connected its groups of the epoch: its word, where a push is to follow.

    `sums` are then a source's parts of the digests of tensors that a target ties: (name, other name, sum, other sum).
    """

    epoch: int
    sums: tuple[tuple[str, str, int, int], ...] = ()


class Failed(Message, frozen=True):
    """Forming an epoch failed on this process. `error` is the class of `refit_sdk.errors` to raise everywhere."""

    epoch: int
    error: str
    causes: tuple[str, ...]


class Done(Message, frozen=True):
    """This process has moved, and as a target installed, or failed to."""

    push: int
    engines: dict[str, EngineDone]


class Leave(Message, frozen=True):
    """This process closes its session: normally, or for a reason."""

    reason: str = ""


class Beat(Message, frozen=True):
    """A sign of life, in both directions."""


class StoreSet(Message, frozen=True):
    """Set a key of the shared table."""

    key: str
    value: bytes


class StoreGet(Message, frozen=True):
    """Ask for a key; answered once it is set."""

    id: int
    key: str


class StoreAdd(Message, frozen=True):
    """Add to a counter."""

    id: int
    key: str
    amount: int


class StoreCheck(Message, frozen=True):
    """Ask whether all keys are set."""

    id: int
    keys: tuple[str, ...]


class StoreDelete(Message, frozen=True):
    """Remove a key."""

    id: int
    key: str


class WorldGet(Message, frozen=True):
    """Ask for a piece of an epoch's world, from byte `start` on; answered by a `StoreReply`, empty if it's gone."""

    id: int
    epoch: int
    start: int


class Welcome(Message, frozen=True):
    """The seats are taken. `late`: the world has formed already; the ranks are in from the next push on.

    `heartbeat` is the rendezvous's: a silence of that many seconds, in either direction, is a loss. `hosted_by` says
    who runs the rendezvous.
    """

    late: bool
    hosted_by: str
    heartbeat: float
    deadline: float


class Refused(Message, frozen=True):
    """The seats can't be had."""

    reason: str


class Form(Message, frozen=True):
    """Plan a world; `fresh` are the engines to connect anew.

    The world's wire form (`refit_sdk.manifest`) has `nbytes` and this `digest`. It's read in pieces, by `WorldGet`, or
    at the `door` of a process of the same host that reads it.
    """

    epoch: int
    nbytes: int
    digest: str
    door: Door | None
    settings: str
    fresh: tuple[str, ...]


class Link(Message, frozen=True):
    """All plans are equal, or stand since an earlier push: connect the fresh groups, if any, and give your word."""

    epoch: int


class Formed(Message, frozen=True):
    """The epoch stands. `waiting`: without this process, as its engine lacks ranks (`lacks`), or no engine is whole."""

    epoch: int
    waiting: bool = False
    lacks: tuple[str, ...] = ()


class Go(Message, frozen=True):
    """Move now, to these engines."""

    epoch: int
    push: int
    version: int
    engines: tuple[str, ...]


class Drop(Message, frozen=True):
    """An engine failed in this push: abort its group."""

    push: int
    engine: str
    cause: str


class Outcome(Message, frozen=True):
    """How a push ended: for a target, as soon as its own engine's part is known; for a source, when all are.

    `ranks` maps a rank to (bytes sent, bytes arrived). `causes` is what to raise if it didn't commit: the first cause
    of each engine that failed, what was required, and what to do.
    """

    push: int
    version: int
    committed: bool
    engines: dict[str, Verdict]
    failures: dict[str, str]
    ranks: dict[str, tuple[int, int]]
    causes: tuple[str, ...] = ()


class Fault(Message, frozen=True):
    """Joining, a push or a reform ended before any byte moved."""

    error: str
    causes: tuple[str, ...]
    failures: dict[str, str]
    engines: dict[str, Verdict]


class Closed(Message, frozen=True):
    """The session is over for this process."""

    reason: str
    normal: bool


class StoreReply(Message, frozen=True):
    """The answer to a request for something of the table, or a piece of the world."""

    id: int
    value: bytes = b""
    number: int = 0


Up = (
    Hello
    | Unable
    | Ready
    | Unready
    | Planned
    | Linked
    | Failed
    | Done
    | Leave
    | Beat
    | StoreSet
    | StoreGet
    | StoreAdd
    | StoreCheck
    | StoreDelete
    | WorldGet
)
Down = Welcome | Refused | Form | Link | Formed | Go | Drop | Outcome | Fault | Closed | StoreReply | Beat

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_up = msgspec.msgpack.Decoder(Up)
_down = msgspec.msgpack.Decoder(Down)


def encode(message: Message) -> bytes:
    """The wire form of a message."""
    return _encoder.encode(message)


def decode_up(body: bytes) -> Up:
    """A message from a process. `RendezvousError` if it doesn't fit the schema."""
    return _decode(_up, body)


def decode_down(body: bytes) -> Down:
    """A message from the rendezvous. `RendezvousError` if it doesn't fit the schema."""
    return _decode(_down, body)


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RendezvousError(f"a control message that doesn't fit the schema arrived: {error}") from error
