"""From a session's arguments to a participant that has joined.

1. Check the arguments; find the token.
2. Source rank 0 hosts the rendezvous, if the address is this host's and nobody listens there yet; a `RefitController`
   that does is joined like any other rendezvous.
3. Choose the adapters and the fabric among the plug-ins, describe the seats, connect, join.
4. A process that can't do step 3 connects to say so, and the host stays a moment for those who haven't come yet: nobody
   need wait out a deadline for a rank that won't come.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
from attrs import evolve, frozen

from refit_sdk import asked
from refit_sdk.adapter import Observer, SourceAdapter, TargetAdapter
from refit_sdk.choosing import expanded
from refit_sdk.control import Address, Client, connect, find_token, listen, parse_rendezvous
from refit_sdk.coordinator import Coordinator
from refit_sdk.errors import RefitError, RendezvousError
from refit_sdk.fabric import Fabric, check_collectives
from refit_sdk.hub import Hub
from refit_sdk.messages import Claim, Down, Unable, Where
from refit_sdk.offers import Registry, choose_adapter, plugin_versions
from refit_sdk.participant import Participant
from refit_sdk.plan import Plan, PlanCache, input_digest, make_plan
from refit_sdk.plugins import registry
from refit_sdk.seat import Held
from refit_sdk.settings import Settings
from refit_sdk.sharing import this_host
from refit_sdk.topology import Topology
from refit_sdk.whereabouts import whereabouts
from refit_sdk.world import Side, World

TELL_SECONDS: Final = 5.0
"""How long a process that can't join tries to tell the others, and a host stays for those who haven't come yet."""


@frozen(kw_only=True)
class Place:
    """A seat as asked for: the model that sits there, and its adapter's name where it was given."""

    side: Side
    engine: str
    rank: int
    size: int
    model: Any
    adapter: str | None
    frozen: tuple[str, ...] = ()


@frozen(kw_only=True)
class Options:
    """A session's arguments, defaults filled in. Seconds are seconds."""

    rendezvous: str
    places: tuple[Place, ...]
    settings: Settings | None
    engines: int | tuple[str, ...] | None
    fabric: str | Fabric
    token: str | None
    insecure: bool
    deadline: float
    heartbeat: float


def rendezvous_or_env(rendezvous: str | None) -> str:
    """The rendezvous as given, or REFIT_RENDEZVOUS. `RendezvousError` if there is neither."""
    found = rendezvous or os.environ.get("REFIT_RENDEZVOUS")
    if not found:
        raise RendezvousError("no rendezvous was given: pass rendezvous='tcp://host:port' or set REFIT_RENDEZVOUS")
    return found


def number_or_env(value: int | None, name: str, variable: str) -> int:
    """A rank or size as given, or from the environment. `RendezvousError` if there is neither, or it isn't a number."""
    text = os.environ.get(variable) if value is None else str(asked.whole(value, name))
    if text is None or not text.lstrip("-").isdigit():
        raise RendezvousError(f"{name}={value!r} and {variable}={text!r}: pass {name}= or start with torchrun")
    return int(text)


def join(options: Options) -> tuple[Participant, Hub | None]:
    """Join as the options say; the participant, and the hub where this process hosts the rendezvous."""
    address = parse_rendezvous(options.rendezvous)
    token = find_token(options.token, address=address, insecure=options.insecure)
    hub = _host(options, address, token)
    participant: Participant | None = None
    try:
        brought = _bring(options, address, token)
        if hub is not None:
            hub.ask(lambda: hub.coordinator.wait_anew(now=time.monotonic()))
        end = time.monotonic() + options.deadline
        participant = brought.participant(_connecting(address, token, options))
        participant.join(
            settings=_to_json(options.settings),
            plugins=_plugins(brought.plugins),
            engines=options.engines,
            pid=os.getpid(),
            host=socket.gethostname(),
            deadline=max(0.1, end - time.monotonic()),
        )
    except BaseException as error:
        reason = f"joining failed: {type(error).__name__}: {error}"
        if participant is not None:
            participant.close(reason)
        if hub is not None:
            hub.linger(min(options.deadline, TELL_SECONDS))
            hub.close(f"source[0]: {reason}", normal=False)
        raise
    return participant, hub


@frozen(eq=False)
class _Brought:
    """What a process brings along: plug-ins, and what it made of its arguments by them."""

    plugins: Registry
    fabric: Fabric
    observers: list[Observer]
    held: dict[Side, Held]
    where: Where

    def participant(self, client_of: Callable[[Callable[[Down], None]], Client]) -> Participant:
        """The process's part in the protocol, connected."""
        return Participant(
            client_of,
            source=self.held.get("source"),
            target=self.held.get("target"),
            planner=_Planner(self.plugins, self.fabric),
            fabric=self.fabric,
            observers=self.observers,
            host=this_host(),
            where=self.where,
        )


def _bring(options: Options, address: Address, token: bytes) -> _Brought:
    """Choose among plug-ins and describe the seats. The others hear at once if that can't be."""
    held: dict[Side, Held] = {}
    try:
        plugins = registry()
        fabric = _fabric(plugins, options.fabric)
        observers = [plugins.get("observer", name)() for name in plugins.names("observer")]
        for place in options.places:
            held[place.side] = _held(plugins, place)
    except Exception as error:
        for each in held.values():
            each.close()
        _tell_unable(options, address, token, reason=f"{type(error).__name__}: {error}")
        raise
    return _Brought(plugins, fabric, observers, held, whereabouts(fabric))


def _tell_unable(options: Options, address: Address, token: bytes, *, reason: str) -> None:
    """Tell the rendezvous why this process can't join, if it can be reached in a few seconds."""
    seconds = min(options.deadline, TELL_SECONDS)
    with contextlib.suppress(RefitError, OSError):
        channel = connect(address, token=token, seconds=seconds)
        client = Client(channel, heartbeat=options.heartbeat, urgent=lambda message: None)
        try:
            client.send(Unable(claims=tuple(map(_claim, options.places)), reason=reason))
            client.next(seconds)
        finally:
            client.close()


def _connecting(address: Address, token: bytes, options: Options) -> Callable[[Callable[[Down], None]], Client]:
    channel = connect(address, token=token, seconds=options.deadline)
    return lambda urgent: Client(channel, heartbeat=options.heartbeat, urgent=urgent)


def _host(options: Options, address: Address, token: bytes) -> Hub | None:
    if not any(place.side == "source" and place.rank == 0 for place in options.places):
        return None
    try:
        listener = listen(address)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None  # a controller's, here or on another host: joining will tell
        raise RendezvousError(f"source[0] can't listen at {address}: {error}") from error
    return serve(
        listener,
        token=token,
        engines=1 if options.engines is None else options.engines,
        deadline=options.deadline,
        heartbeat=options.heartbeat,
        hosted_by="source[0]",
    )


def serve(
    listener: socket.socket,
    *,
    token: bytes,
    engines: int | tuple[str, ...],
    deadline: float,
    heartbeat: float,
    hosted_by: str,
) -> Hub:
    """Host a rendezvous on a bound socket."""
    coordinator = Coordinator(
        engines=engines, deadline=deadline, heartbeat=heartbeat, now=time.monotonic(), hosted_by=hosted_by
    )
    return Hub(listener, token=token, coordinator=coordinator, heartbeat=heartbeat)


def _fabric(plugins: Registry, fabric: str | Fabric) -> Fabric:
    if not isinstance(fabric, str):
        return fabric
    made: Fabric = plugins.get("fabric", fabric)()
    return made


def _held(plugins: Registry, place: Place) -> Held:
    kind = "source_adapter" if place.side == "source" else "target_adapter"
    chosen = choose_adapter(plugins, kind, place.model, place.adapter)
    adapter: SourceAdapter | TargetAdapter = chosen(place.model, rank=place.rank, size=place.size)
    return Held(_claim(place), adapter, frozen=place.frozen)


def _claim(place: Place) -> Claim:
    return Claim(place.side, place.engine, place.rank, place.size)


def _plugins(plugins: Registry) -> dict[str, str]:
    return dict(plugin_versions(plugins))


def _to_json(settings: Settings | None) -> str | None:
    return None if settings is None else msgspec.json.encode(settings).decode()


class _Planner:
    """Plans worlds, and remembers the plans it made. `fabric` is what carries the steps."""

    def __init__(self, plugins: Registry, fabric: Fabric) -> None:
        self._plugins = plugins
        self._fabric = fabric
        self._cache = PlanCache()

    def __call__(self, world: World, settings: str) -> tuple[str, Plan]:
        stated = msgspec.json.decode(settings, type=Settings)
        routed = dict.fromkeys(name for _, transport in stated.routes for name in expanded(transport))
        transports = {name: self._plugins.get("transport", name)() for name in routed}
        check_collectives(self._fabric, transports.values())
        topology = Topology.of(world, stated.topology)
        same = evolve(world, epoch=0)  # an epoch that changed nothing needs no new plan
        versions = _plugins(self._plugins)  # of those that are routed: what else is installed shapes no plan
        used = {name: versions[name] for name in transports}
        key = input_digest(same, settings=stated, topology=topology, plugins=used)
        plan = self._cache.get(key, lambda: make_plan(same, settings=stated, transports=transports, topology=topology))
        return key, plan
