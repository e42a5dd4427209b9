"""What a process moves with: the epoch's plan, the groups of the engines that it is in, and the executors on them.

1. An epoch's plan is adopted; groups whose engine is fresh, or that this process is in no more, are closed, and those
   that are missing are connected. The others go on as they are.
2. A push runs the executor of the engines that take part; it is kept, with its buffers, for the next push to the same.
3. What the rendezvous says of a push may come before, during or after its run: drops are remembered by push.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from attrs import define, field

from refit_sdk.binding import Finder
from refit_sdk.errors import RefitError
from refit_sdk.executor import Executor, Moved
from refit_sdk.fabric import Deadline, Fabric, FabricError, Group, KeyValue, serves
from refit_sdk.plan import Plan
from refit_sdk.program import Program


@define(eq=False)
class Standing:
    """What was agreed on in this epoch. `fresh` are the engines whose groups are to be connected anew."""

    epoch: int
    plan: Plan
    process: int
    fresh: tuple[str, ...]
    programs: dict[frozenset[str], Program] = field(factory=dict)
    executors: dict[frozenset[str], Executor] = field(factory=dict)

    def members(self) -> dict[str, list[int]]:
        """The engines whose groups this process is in, each with its members."""
        seats = self.plan.world.seats
        found = {}
        for engine in self.plan.world.engines:
            members = {seat.process for seat in seats if seat.side == "source" or seat.engine == engine}
            if self.process in members:
                found[engine] = sorted(members)
        return found


class Mover:
    """Groups and executors of one process. `drop` and `abort` may be called from any thread, all else from one."""

    def __init__(self, fabric: Fabric, *, after_window: Callable[[int, int], None]) -> None:
        self.standing: Standing | None = None
        self._after_window = after_window
        self._fabric = fabric
        self._groups: dict[str, Group] = {}
        self._lock = threading.Lock()
        self._drops: dict[int, dict[str, str]] = {}
        self._running: tuple[int, Executor] | None = None

    @property
    def fabric(self) -> str:
        """The name of the fabric."""
        return self._fabric.name

    @property
    def _stands(self) -> Standing:
        assert self.standing is not None
        return self.standing

    def connect(self, store: KeyValue, *, timeout: float) -> None:
        """Bring the groups to what the epoch needs. `FabricError` if one can't be connected in `timeout` seconds."""
        standing, needed = self._stands, self._stands.members()
        for engine in [name for name in self._groups if name not in needed or name in standing.fresh]:
            self._groups.pop(engine).close()
        for engine in sorted(needed.keys() - self._groups.keys()):
            group = self._connected(engine, needed[engine], store=store, timeout=timeout)
            with self._lock:
                self._groups[engine] = group
        standing.fresh = ()
        if standing.plan.relays:
            _ = self.program(self.mine(self._groups)).relays  # looked up now, not in the first push

    def _connected(self, engine: str, members: list[int], *, store: KeyValue, timeout: float) -> Group:
        group = f"{self._stands.epoch}/{engine}"
        process = self._stands.process
        try:
            return self._fabric.connect(group=group, members=members, process=process, store=store, timeout=timeout)
        except Exception as error:
            told = str(error) if isinstance(error, RefitError) else f"{type(error).__name__}: {error}"
            peer = error.peer if isinstance(error, FabricError) else None
            raise FabricError(
                f"fabric {self._fabric.name!r} can't connect the group of engine {engine}: {told}", peer=peer
            ) from error

    def mine(self, engines: Iterable[str]) -> frozenset[str]:
        """Those of some engines that this process has a part in."""
        return frozenset(name for name in engines if name in self._groups)

    def name(self, process: int) -> str:
        """The names of a process's ranks."""
        seats = self.standing.plan.world.seats if self.standing is not None else ()
        return "+".join(str(seat) for seat in seats if seat.process == process) or f"process {process}"

    def links(self) -> dict[tuple[str, str], str]:
        """What serves each link on which the plan moves bytes from or to this process, by the names of both ends; of
        nothing before there is a plan.
        """
        if self.standing is None:
            return {}
        me, found = self.standing.process, set()
        for window in self.program(self.mine(self._groups)).windows:
            found |= {(message.engine, (me, message.peer)) for message in window.sends}
            found |= {(message.engine, (message.peer, me)) for message in window.recvs}
        name = self._fabric.name
        return {
            (self.name(src), self.name(dst)): serves(self._groups[engine], (src, dst), otherwise=name)
            for engine, (src, dst) in sorted(found)
        }

    def program(self, engines: frozenset[str]) -> Program:
        """This process's part of a push to these engines."""
        standing = self._stands
        if engines not in standing.programs:
            standing.programs[engines] = standing.plan.program(standing.process).only(engines)
        return standing.programs[engines]

    def executor(self, engines: frozenset[str], *, sources: Finder | None, targets: Finder | None) -> Executor:
        """The executor of a push to these engines, over the live views of both sides."""
        standing = self._stands
        for others, executor in standing.executors.items():
            if others != engines:
                executor.release()  # one set of window buffers a process, whichever engines take part
        if engines not in standing.executors:
            groups = {name: group for name, group in self._groups.items() if name in engines}
            standing.executors[engines] = Executor(
                self.program(engines), sources=sources, targets=targets, groups=groups, after_window=self._after_window
            )
        return standing.executors[engines]

    def run(self, push: int, executor: Executor, *, seconds: float) -> Moved:
        """Run one push, listening for drops of its engines, for at most `seconds`."""
        with self._lock:
            self._running = (push, executor)
            for engine, cause in self._drops.pop(push, {}).items():
                executor.drop(engine, cause)
        try:
            return executor.run(Deadline.after(seconds))
        finally:
            with self._lock:
                self._running = None
                self._drops.clear()

    def drop(self, push: int, engine: str, cause: str) -> None:
        """An engine failed in a push: leave it out of the run, now or when it begins."""
        with self._lock:
            self._drops.setdefault(push, {}).setdefault(engine, cause)
            if self._running is not None and self._running[0] == push:
                self._running[1].drop(engine, cause)

    def abort(self, reason: str) -> None:
        """End everything that is pending, in all groups."""
        with self._lock:
            for engine, group in self._groups.items():
                if self._running is not None:
                    self._running[1].drop(engine, reason)
                group.abort(reason)

    def forget(self) -> None:
        """Let go of executors, which are bound to views that aren't live any more."""
        if self.standing is not None:
            self.standing.executors.clear()

    def release(self) -> None:
        """Free the window buffers; the next push makes new ones."""
        for executor in self.standing.executors.values() if self.standing is not None else ():
            executor.release()

    def close(self) -> None:
        """Close all groups."""
        self.abort("this session is closed")
        self.standing = None
        for group in self._groups.values():
            group.close()
        self._groups.clear()
