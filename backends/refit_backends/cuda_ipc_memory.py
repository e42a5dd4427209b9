"""Device memory that a process shares with others of its host: one plain allocation, cut into a ring for each peer.

1. Allocate it with `cudaMalloc`: what torch's allocator hands out may be of a kind that can't be shared.
2. Write a nonce to it, tell the nonce and the handle (bytes), open those of all peers and read their nonces: a pair
   that can't is known by name when it connects, and not at the first message.
3. Once all have looked, the nonces are overwritten by what is sent.

It's freed when every peer has closed it, or has died; else it's kept until the process ends, as freeing memory that
somebody has open is undefined.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
from attrs import define, field

from refit_backends.cudart import Cuda
from refit_sdk.fabric import Deadline, FabricError, KeyValue, roll_call

SLOTS: Final = 4
SLOT_NBYTES: Final = 8 << 20
"""Each peer takes so many slots of so many bytes of device memory, made when the group connects."""

NONCE_NBYTES: Final = 16


class Word(msgspec.Struct, frozen=True):
    """What a process tells of its memory: the handle and the nonce in hexadecimal, the device's address, and the bytes
    of a slot."""

    handle: str
    nonce: str
    device: str
    slot_nbytes: int


@define(eq=False)
class SharedMemory:
    """This process's allocation and the peers' that it has opened. `peers` in ascending order."""

    cuda: Cuda
    device: int
    slot_nbytes: int
    peers: tuple[int, ...]
    base: int
    opened: dict[int, int] = field(factory=dict, init=False)
    still_open: set[int] = field(factory=set, init=False)
    """Peers that haven't said that they closed this process's memory."""

    @classmethod
    def made(cls, cuda: Cuda, device: int, peers: Iterable[int], *, slot_nbytes: int) -> SharedMemory:
        """New memory, with room for a ring to each peer."""
        order = tuple(sorted(peers))
        return cls(cuda, device, slot_nbytes, order, cuda.allocate(max(1, len(order)) * SLOTS * slot_nbytes))

    def slot_to(self, peer: int, turn: int) -> int:
        """The address of the slot that this process fills for a peer at its turn-th chunk."""
        return self.base + (self.peers.index(peer) * SLOTS + turn % SLOTS) * self.slot_nbytes

    def slot_of(self, peer: int, turn: int, *, process: int) -> int:
        """The address of the slot that a peer fills for this process."""
        others = sorted({*self.peers, process} - {peer})
        return self.opened[peer] + (others.index(process) * SLOTS + turn % SLOTS) * self.slot_nbytes

    def share(self, *, group: str, members: Sequence[int], process: int, store: KeyValue, deadline: Deadline) -> None:
        """Open all peers' memory. `FabricError` naming a pair that can't."""

        def call(step: str, word: bytes) -> dict[int, bytes]:
            name = f"{group}/cuda_ipc{step}"
            return roll_call(store, group=name, members=members, process=process, deadline=deadline, word=word)

        nonce = secrets.token_bytes(NONCE_NBYTES)
        self.cuda.write(self.base, nonce)
        word = Word(self.cuda.export(self.base).hex(), nonce.hex(), self.cuda.bus(self.device), self.slot_nbytes)
        told = call("", msgspec.json.encode(word))
        words = {member: msgspec.json.decode(text, type=Word) for member, text in told.items()}
        faults = {peer: fault for peer in self.peers if (fault := self._fault(peer, words[peer]))}
        self.still_open.update(self.peers)
        found = call("/opened", msgspec.json.encode(faults))
        opened = {member: msgspec.json.decode(text, type=dict[int, str]) for member, text in found.items()}
        if any(opened.values()):
            for peer in self.peers:
                self.close_of(peer)
            call("/closed", b"")
            self.still_open.clear()
            raise _refusal(opened, words)

    def _fault(self, peer: int, word: Word) -> str:
        """Open one peer's memory; why it can't be opened or isn't what the peer made, or nothing."""
        if word.slot_nbytes != self.slot_nbytes:
            return f"slots of {word.slot_nbytes} bytes there and of {self.slot_nbytes} here; give all the same"
        try:
            self.opened[peer] = self.cuda.open(bytes.fromhex(word.handle))
            if self.cuda.read(self.opened[peer], NONCE_NBYTES) != bytes.fromhex(word.nonce):
                return "it reads other bytes there than were written"
        except FabricError as error:
            return str(error)
        return ""

    def close_of(self, peer: int) -> None:
        """Close a peer's memory."""
        if (address := self.opened.pop(peer, None)) is not None:
            with self.cuda.on(self.device):
                self.cuda.close(address)

    def free(self) -> None:
        """Close all, and free this process's own unless somebody may have it open still."""
        for peer in list(self.opened):
            self.close_of(peer)
        if not self.still_open and self.base:
            with self.cuda.on(self.device):
                self.cuda.free(self.base)
        self.base = 0


def _refusal(faults: Mapping[int, Mapping[int, str]], words: Mapping[int, Word]) -> FabricError:
    """What all processes are told when any couldn't open some memory."""
    found = [(reader, owner, why) for reader, each in faults.items() for owner, why in each.items()]
    reader, owner, why = found[0]
    return FabricError(
        f"fabric cuda_ipc joins processes that can open each other's device memory, and {len(found)} pairs can't: "
        f"process {reader} on {words[reader].device} can't open that of process {owner} on {words[owner].device} "
        f"({why}); run them as one user in one container, on devices with peer access (`nvidia-smi topo -p2p r`), "
        "one process each, or use fabric 'nccl'",
        peer=owner,
    )
