"""A torch `Store` on top of a session's `KeyValue`, so that a group of torch's opens no listener for its rendezvous."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from refit_sdk.fabric import Deadline, KeyValue


class KeyValueStore(dist.Store):  # type: ignore[misc, name-defined]
    """What `ProcessGroupGloo` asks of a store, under a prefix. No wait in it goes beyond the deadline.

    The group calls it from C++, so whoever makes one has to keep it as long as the group lives.
    """

    def __init__(self, table: KeyValue, *, prefix: str, deadline: Deadline) -> None:
        super().__init__()
        self._table = table
        self._prefix = prefix
        self._deadline = deadline

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._table.set(self._key(key), value if isinstance(value, bytes) else value.encode())

    def get(self, key: str) -> bytes:
        """The value, waited for until the deadline."""
        return self._table.get(self._key(key), timeout=self._deadline.remaining())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        for key in keys:
            left = self._deadline.remaining()
            self._table.get(self._key(key), timeout=min(left, timeout.total_seconds()) if timeout else left)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self._table.add(self._key(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return self._table.check([self._key(key) for key in keys])

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._table.delete(self._key(key))
