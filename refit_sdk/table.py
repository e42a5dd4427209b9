"""The shared table at the rendezvous, through which fabrics find each other. Pure: requests in, answers out.

>>> table = Table()
>>> table.handle(1, StoreGet(id=7, key="where"))
[]
>>> table.handle(2, StoreSet(key="where", value=b"here"))
[(1, StoreReply(id=7, value=b'here', number=0))]
"""

from __future__ import annotations

from refit_sdk.messages import Message, StoreAdd, StoreCheck, StoreDelete, StoreGet, StoreReply, StoreSet


class Table:
    """The shared table at the rendezvous: values by key, and the questions that wait for one."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[int, int]]] = {}

    def handle(
        self, link: int, message: StoreSet | StoreGet | StoreAdd | StoreCheck | StoreDelete
    ) -> list[tuple[int, Message]]:
        """Answers to a request, as (link, message)."""
        match message:
            case StoreSet(key=key, value=value):
                return self._set(key, value)
            case StoreGet(id=id, key=key) if key in self._values:
                return [(link, StoreReply(id=id, value=self._values[key]))]
            case StoreGet(id=id, key=key):
                self._waiting.setdefault(key, []).append((link, id))
                return []
            case StoreAdd(id=id, key=key, amount=amount):
                found = self._values.get(key, b"")
                number = (int(found) if found.lstrip(b"-").isdigit() else 0) + amount
                return [*self._set(key, str(number).encode()), (link, StoreReply(id=id, number=number))]
            case StoreCheck(id=id, keys=keys):
                return [(link, StoreReply(id=id, number=int(all(key in self._values for key in keys))))]
            case StoreDelete(id=id, key=key):
                return [(link, StoreReply(id=id, number=int(self._values.pop(key, None) is not None)))]

    def _set(self, key: str, value: bytes) -> list[tuple[int, Message]]:
        self._values[key] = value
        return [(link, StoreReply(id=id, value=value)) for link, id in self._waiting.pop(key, [])]

    def clear(self) -> None:
        """Forget everything, when an epoch's groups have been connected."""
        self._values.clear()
        self._waiting.clear()
