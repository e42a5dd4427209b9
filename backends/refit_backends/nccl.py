"""Fabric `nccl`: CUDA tensors between devices, by NCCL's own sends and receives; torch.distributed isn't involved.

1. The roll call tells NCCL's version and the device of each member, and of the first one a unique id that it made.
2. All make one non-blocking communicator from it (`nccl_library`), and ask until it stands or the deadline is there.
3. What a window posts is begun as one operation, on a stream that all groups of the device share (`nccl_lane`).
4. Waits ask an event; an abort ends the communicator (`nccl_group`).

NCCL is the library that torch has loaded. Bytes are neither authenticated nor encrypted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from refit_backends.cudart import Cuda, patiently, why_not
from refit_backends.nccl_group import NcclGroup
from refit_backends.nccl_lane import Lane
from refit_backends.nccl_library import IN_PROGRESS, SUCCESS, Nccl, written
from refit_sdk.fabric import Deadline, Fabric, FabricError, KeyValue, roll_call
from refit_sdk.hookspecs import hookimpl

ASK_SECONDS: Final = 0.25
"""How often who waits for a communicator asks whether the session is still there."""


class Word(msgspec.Struct, frozen=True):
    """What a member tells: its NCCL, its host and device, and the first member the id of the communicator."""

    version: int
    host: str
    device: str
    unique_id: str = ""


def host() -> str:
    """A name of this machine that is its own: of its kernel, since it started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class NcclFabric:
    """NCCL between the processes of a group, each with its own device: `device`, or the current one when it connects.
    `library` and `runtime` are paths of libnccl and libcudart, where they aren't to be those that torch has loaded.

    >>> NcclFabric(device=0).name
    'nccl'
    """

    name: ClassVar[str] = "nccl"
    group_class: ClassVar[type[NcclGroup]] = NcclGroup

    def __init__(self, *, device: int | None = None, library: str | None = None, runtime: str | None = None) -> None:
        self._device = device
        self._library = library
        self._runtime = runtime
        self._lanes: dict[int, Lane] = {}
        self._lock = threading.Lock()

    @classmethod
    def missing(cls) -> str | None:
        """Why it can't be used here and what to install, or None if it can."""
        return why_not(Cuda.found, Nccl.found)

    @classmethod
    def about(cls) -> str:
        """The versions and places of what it uses."""
        nccl = Nccl.found()
        return f"NCCL {written(nccl.version)}, {nccl.path}"

    def connect(
        self, *, group: str, members: Sequence[int], process: int, store: KeyValue, timeout: float
    ) -> NcclGroup:
        """Make the communicator. `FabricError` naming who doesn't come, or whose NCCL is another."""
        deadline = Deadline.after(timeout)
        cuda, nccl = Cuda.found(self._runtime), Nccl.found(self._library)
        device = cuda.device() if self._device is None else self._device
        with cuda.on(device):
            first = process == members[0]
            word = Word(nccl.version, host(), cuda.bus(device), nccl.unique_id().hex() if first else "")
            words = _told(word, group=group, members=members, process=process, store=store, deadline=deadline)
            size, unique_id = len(members), bytes.fromhex(words[members[0]].unique_id)
            comm = self._begun(nccl, unique_id, rank=members.index(process), size=size, words=words)
            _await(nccl, comm, store=store, deadline=deadline, words=words)
            made = self.group_class(group, tuple(members), process, nccl, comm, self._lane(cuda, device))
            made.lane.get_on(made)
        return made

    def _begun(self, nccl: Nccl, unique_id: bytes, *, rank: int, size: int, words: dict[int, Word]) -> int:
        try:
            return nccl.begin(unique_id, rank=rank, size=size)
        except FabricError as error:
            raise FabricError(f"{error}; the members are {_places(words)}") from error

    def _lane(self, cuda: Cuda, device: int) -> Lane:
        with self._lock:
            return self._lanes.setdefault(device, Lane(cuda, device))


def _told(
    word: Word, *, group: str, members: Sequence[int], process: int, store: KeyValue, deadline: Deadline
) -> dict[int, Word]:
    """What all members tell. `FabricError` if their versions differ."""
    said = msgspec.json.encode(word)
    heard = roll_call(store, group=f"{group}/nccl", members=members, process=process, deadline=deadline, word=said)
    words = {member: msgspec.json.decode(text, type=Word) for member, text in heard.items()}
    other = next((member for member, each in words.items() if each.version != word.version), None)
    if other is not None:
        raise FabricError(
            f"process {other} has NCCL {written(words[other].version)}, process {process} has {written(word.version)}; "
            "a communicator takes one version: give both images the same nvidia-nccl, or NcclFabric(library=...)",
            peer=other,
        )
    return words


def _await(nccl: Nccl, comm: int, *, store: KeyValue, deadline: Deadline, words: dict[int, Word]) -> None:
    """Wait until a communicator stands. One that doesn't is aborted."""
    wrong = ""
    try:
        while not patiently(lambda: nccl.state(comm) != IN_PROGRESS, Deadline.after(ASK_SECONDS)):
            store.check([])  # an error if the session has ended meanwhile
            if not deadline.remaining():
                wrong = "it didn't stand in time"
                break
        if not wrong and (state := nccl.state(comm)) != SUCCESS:
            wrong = f"NCCL says {nccl.words(state, comm)}"
    except BaseException:
        _abort(nccl, comm)
        raise
    if wrong:
        _abort(nccl, comm)
        raise FabricError(f"no communicator of {_places(words)}: {wrong}; NCCL_DEBUG=INFO and NCCL_SOCKET_IFNAME help")


def _abort(nccl: Nccl, comm: int) -> None:
    threading.Thread(target=nccl.abort, args=(comm,), name="refit-nccl-abort", daemon=True).start()


def _places(words: dict[int, Word]) -> str:
    """Where the members are; of those that share a device it's said."""
    where = {member: (word.host, word.device) for member, word in words.items()}
    rivals = [member for member, place in where.items() if list(where.values()).count(place) > 1]
    told = ", ".join(f"{member} on {word.device} of {word.host[:8]}" for member, word in words.items())
    if not rivals or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0":
        return told
    return f"{told} (processes {rivals} share a device, which takes NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1)"


@hookimpl
def refit_register_fabrics() -> list[type[Fabric]]:
    """The fabric of this module."""
    return [NcclFabric]
