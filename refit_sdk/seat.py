"""One seat of this process: the adapter that sits there, what it described last, and whether that still holds.

1. Describe: fragments from the adapter, folded into a manifest, encoded; live views indexed by name.
2. At each push the adapter's identity is compared. Only if it changed is the model described again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from refit_sdk import manifest as wire
from refit_sdk.adapter import Fragment, SourceAdapter, TargetAdapter
from refit_sdk.agreement import Sums
from refit_sdk.aliases import TiedCheck
from refit_sdk.bits import host_bits
from refit_sdk.box import Box
from refit_sdk.errors import LayoutError, RefitError
from refit_sdk.fold import fold
from refit_sdk.messages import Claim
from refit_sdk.overlap import subtract
from refit_sdk.plan import Plan
from refit_sdk.routes import Pattern, nearest
from refit_sdk.verify import combine, digest
from refit_sdk.views import Views, check_storage


class Held:
    """A seat and its adapter. `body` is the manifest's wire form, `views` the live views."""

    def __init__(
        self,
        claim: Claim,
        adapter: SourceAdapter | TargetAdapter,
        *,
        frozen: Iterable[str] = (),
    ) -> None:
        """`frozen` are patterns of tensors that pushes leave alone."""
        self.claim = claim
        self._patterns = [Pattern(text) for text in frozen]
        self._adapter = adapter
        self.entering: Callable[[], None] = lambda: None
        """Called as this process enters a push or a reform; what it raises keeps the process out."""
        self._identity: Hashable = None
        self._describe()
        self._sent: bytes | None = self.body

    def _describe(self) -> None:
        described = self._adapter.describe()
        left_alone = {fragment.name for fragment in described if self._is_frozen(fragment.name)}
        fragments = [fragment for fragment in described if fragment.name not in left_alone]
        if left_alone and getattr(self._adapter, "needs_all", False):
            raise LayoutError(
                f"{self.claim} can't leave {', '.join(sorted(left_alone)[:4])} frozen: what it writes is made "
                f"anew by every push, and would lack them; drop frozen=, or leave them out of what it takes"
            )
        if self.claim.side == "target":
            check_storage(fragments)
        body, views, identity = wire.encode(fold(fragments)), Views(fragments), self._adapter.identity()
        self.body, self.views, self._identity = body, views, identity
        self._left_alone = left_alone
        self._shapes = {name: f.shape for f in fragments for name in (f.name, *f.aliases)}
        self.frozen = self._frozen_by_pattern(described)

    def _is_frozen(self, name: str) -> bool:
        return any(pattern.matches(name) for pattern in self._patterns)

    def _frozen_by_pattern(self, described: Iterable[Fragment]) -> dict[str, str | None]:
        """Each pattern of frozen tensors: None if it matches something that is here, else the nearest name that is."""
        if not self._patterns:
            return {}
        aliases = {alias: fragment.name for fragment in described for alias in fragment.aliases}
        names = {*(fragment.name for fragment in described), *getattr(self._adapter, "uncovered", ())}
        found: dict[str, str | None] = {}
        for pattern in self._patterns:
            tied = next((name for alias, name in aliases.items() if pattern.matches(alias)), None)
            matches = any(map(pattern.matches, names))
            found[pattern.text] = None if matches else tied or nearest(pattern.text, names) or ""
        return found

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Names of tensors that no push writes: frozen ones, and those that the adapter says aren't described."""
        return tuple(sorted({*getattr(self._adapter, "uncovered", ()), *self._left_alone}))

    def prepare(self) -> None:
        """Let a source make its values ready to be read."""
        if isinstance(self._adapter, SourceAdapter):
            self._adapter.prepare()

    def has_moved(self) -> bool:
        """Whether anything that was described has been rebound or reshaped since."""
        return self._adapter.identity() != self._identity

    def refresh(self) -> bool:
        """Describe again if anything moved; whether it did."""
        moved = self.has_moved()
        if moved:
            self._describe()
        self.entering()
        return moved

    def changed_body(self) -> bytes | None:
        """The manifest if it isn't the one that the rendezvous has, else None. It is taken as sent."""
        changed = self.body if self.body != self._sent else None
        self._sent = self.body
        return changed

    @property
    def _target(self) -> TargetAdapter:
        if not isinstance(self._adapter, TargetAdapter):
            raise RefitError(f"{self.claim} is not a target")
        return self._adapter

    def install(self, *, version: int) -> None:
        """Let a target refresh what is derived from weights."""
        self._target.install(version=version)

    def fence(self, reason: str) -> None:
        """Keep a target from serving."""
        self._target.fence(reason)

    def unfence(self) -> None:
        """Let a target serve."""
        self._target.unfence()

    def trim(self) -> None:
        """Let an adapter that maps files drop their pages, if it has a `trim`."""
        self._ask("trim")

    def close(self) -> None:
        """Let an adapter give back what it opened, if it has a `close`."""
        self._ask("close")

    def _ask(self, verb: str) -> None:
        method = getattr(self._adapter, verb, None)
        if callable(method):
            method()

    def sums(self, plan: Plan, *, process: int) -> Sums:
        """This source's parts of the digests of tensors that a target ties, read now."""
        sums = []
        for check in plan.tied_checks:
            name, other = check.names
            sums.append((name, other, self._digest(check, name, process), self._digest(check, other, process)))
        return tuple(sums)

    def _digest(self, check: TiedCheck, name: str, process: int) -> int:
        boxes = [share.box for share in check.shares if (share.process, share.name) == (process, name)]
        found = [(part, view) for box in boxes for part, view in self._once(name, box)]
        return combine(digest(host_bits(view), box=part, shape=self._shapes[name]) for part, view in found)

    def _once(self, name: str, box: Box) -> list[tuple[Box, Any]]:
        """Views that have each element of the box once, where this rank may store some of it twice."""
        parts: list[tuple[Box, Any]] = []
        for part, view in self.views.find(name, box):
            new = subtract(part, [taken for taken, _ in parts])
            parts += [(rest, view[rest.relative_to(part).slices()]) for rest in new]
        return parts


class Gate:
    """A target's fence over several pushes. `held`: it is fenced; `served`: it wasn't, when the current push began."""

    def __init__(self, target: Held | None) -> None:
        """A process without a target has nothing to fence; then all verbs do nothing."""
        self._target = target
        self.held = self.served = False

    def hold(self, reason: str) -> None:
        """Fence until a full push succeeds, or until it's known that this one changed nothing."""
        if self._target is not None:
            self.held = True
            self._target.fence(reason)

    def open(self) -> None:
        """Serve, after a version was committed."""
        if self._target is not None:
            self.held = False
            self._target.unfence()

    def open_again(self) -> None:
        """End the fence of this push, which changed nothing; one that was there before stays."""
        if self.served:
            self.open()
