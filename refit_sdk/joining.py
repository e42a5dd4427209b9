"""From a session's arguments to a participant that has joined.

1. Check the arguments; find the token; choose the adapters, the fabric and the transports among the plug-ins.
2. Source rank 0 hosts the rendezvous, if the address is this host's and nobody listens there yet; a `RefitController`
   that does is joined like any other rendezvous.
3. Describe the seats, connect, join.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from attrs import evolve, frozen

from refit_sdk.adapter import SourceAdapter, TargetAdapter
from refit_sdk.control import Address, Client, connect, find_token, listen, parse_rendezvous
from refit_sdk.coordinator import Coordinator
from refit_sdk.errors import RendezvousError
from refit_sdk.fabric import Fabric
from refit_sdk.hub import Hub
from refit_sdk.messages import Claim, Down
from refit_sdk.offers import Registry, choose_adapter, plugin_versions
from refit_sdk.participant import Participant
from refit_sdk.plan import Plan, PlanCache, input_digest, make_plan
from refit_sdk.plugins import registry
from refit_sdk.seat import Held
from refit_sdk.settings import Settings
from refit_sdk.topology import Topology
from refit_sdk.world import Side, World


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
    text = os.environ.get(variable) if value is None else str(value)
    if text is None or not text.lstrip("-").isdigit():
        raise RendezvousError(f"{name}={value!r} and {variable}={text!r}: pass {name}= or start with torchrun")
    return int(text)


def join(options: Options) -> tuple[Participant, Hub | None]:
    """Join as the options say; the participant, and the hub where this process hosts the rendezvous."""
    address = parse_rendezvous(options.rendezvous)
    token = find_token(options.token, address=address, insecure=options.insecure)
    plugins = registry()
    fabric = _fabric(plugins, options.fabric)
    held = {place.side: _held(plugins, place) for place in options.places}
    end = time.monotonic() + options.deadline
    hub = _host(options, address, token)
    try:
        participant = Participant(
            _connecting(address, token, options),
            source=held.get("source"),
            target=held.get("target"),
            planner=_Planner(plugins),
            fabric=fabric,
            observers=[plugins.get("observer", name)() for name in plugins.names("observer")],
        )
    except BaseException:
        _give_up(hub, "source[0] could not connect")
        raise
    try:
        participant.join(
            settings=_to_json(options.settings),
            plugins=_plugins(plugins),
            engines=options.engines,
            pid=os.getpid(),
            host=socket.gethostname(),
            deadline=max(0.1, end - time.monotonic()),
        )
    except BaseException as error:
        participant.close(f"joining failed: {type(error).__name__}: {error}")
        _give_up(hub, f"source[0]: joining failed: {type(error).__name__}: {error}")
        raise
    return participant, hub


def _give_up(hub: Hub | None, reason: str) -> None:
    if hub is not None:
        hub.close(reason, normal=False)


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
    claim = Claim(place.side, place.engine, place.rank, place.size)
    return Held(claim, adapter, frozen=_matcher(place.frozen))


def _matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def _plugins(plugins: Registry) -> dict[str, str]:
    return dict(plugin_versions(plugins))


def _to_json(settings: Settings | None) -> str | None:
    return None if settings is None else msgspec.json.encode(settings).decode()


class _Planner:
    """Plans worlds, and remembers the plans it made."""

    def __init__(self, plugins: Registry) -> None:
        self._plugins = plugins
        self._cache = PlanCache()

    def __call__(self, world: World, settings: str) -> tuple[str, Plan]:
        stated = msgspec.json.decode(settings, type=Settings)
        transports = {name: self._plugins.get("transport", name)() for _, name in stated.routes}
        topology = Topology.single(world.num_processes)
        same = evolve(world, epoch=0)  # an epoch that changed nothing needs no new plan
        versions = _plugins(self._plugins)  # of those that are routed: what else is installed shapes no plan
        used = {name: versions[name] for name in transports}
        key = input_digest(same, settings=stated, topology=topology, plugins=used)
        plan = self._cache.get(key, lambda: make_plan(same, settings=stated, transports=transports, topology=topology))
        return key, plan
