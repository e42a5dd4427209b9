"""What every process of one demo run is told. No torch.

>>> from refit_sdk.demo.config import SIZES
>>> from pathlib import Path
>>> Job(SIZES["tiny"], directory=Path("/tmp"), rendezvous="tcp://127.0.0.1:29600").num_tokens
32
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from attrs import frozen

from refit_sdk.demo.checkpoint import Checkpoint
from refit_sdk.demo.config import DecoderConfig

ENGINE: Final = "rollout-0"
"""The one engine of the demo."""


@frozen
class Job:
    """One run: who takes part, where they meet, and what they train. `directory` is removed when the run ends."""

    config: DecoderConfig
    directory: Path
    rendezvous: str
    checkpoint: Checkpoint | None = None
    sources: int = 4
    targets: int = 2
    pushes: int = 5
    seed: int = 0
    timeout: float = 300.0
    mixed_precision: bool = False
    num_tokens: int = 32


def use_loopback() -> None:
    """Keep torch's own gloo groups on the loopback interface, unless the user chose another."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
