"""A demo run: options in, a row per push out. No torch in this process.

1. Everything that can be refused is refused here, before any process starts: the checkpoint, the sizes, the split.
2. A private directory and a reserved port on 127.0.0.1 are taken, and given back when the run ends, however it ends.
3. Sources and targets run in a crew; what they say is put together to rows.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
from attrs import frozen

from refit_sdk.demo.checkpoint import open_checkpoint
from refit_sdk.demo.config import SIZES, DecoderConfig
from refit_sdk.demo.job import ENGINE, Job
from refit_sdk.demo.processes import Crew
from refit_sdk.demo.rows import Row, Tally
from refit_sdk.errors import RefitError


@frozen(kw_only=True)
class Options:
    """What a user asks of the demo. `size` and `tied` are for a model of its own, `checkpoint` for a stored one.

    >>> Options(size="tiny", tied=False).config().tied
    False
    """

    sources: int = 4
    targets: int = 2
    pushes: int = 5
    size: str | None = None
    tied: bool | None = None
    checkpoint: Path | None = None
    seed: int = 0
    timeout: float = 300.0
    mixed_precision: bool = False

    def __attrs_post_init__(self) -> None:
        counts = {"sources": self.sources, "targets": self.targets, "pushes": self.pushes, "timeout": self.timeout}
        if wrong := {name: value for name, value in counts.items() if value <= 0}:
            raise RefitError(f"the demo needs at least one of each, and time; found {wrong}")
        if self.checkpoint and (self.size is not None or self.tied is not None):
            raise RefitError("--checkpoint brings its own size and head; leave out --size, --tied and --untied")
        if self.size is not None and self.size not in SIZES:
            raise RefitError(f"--size is one of {', '.join(SIZES)}, found {self.size!r}")

    def config(self) -> DecoderConfig:
        """The shape of a model that isn't read from a checkpoint."""
        return attrs.evolve(SIZES[self.size or "small"], tied=self.tied is not False)


def run_demo(options: Options) -> Generator[Row]:
    """Run it; a row when a push is through and checked. Leaving the iterator early ends every process."""
    checkpoint = open_checkpoint(options.checkpoint) if options.checkpoint else None
    config = checkpoint.config if checkpoint else options.config()
    config.check_tensor_parallel(options.targets)
    with TemporaryDirectory(prefix="refit-demo-") as directory, reserved_port() as port:
        job = Job(
            config=config,
            directory=Path(directory),
            rendezvous=f"tcp://127.0.0.1:{port}",
            checkpoint=checkpoint,
            sources=options.sources,
            targets=options.targets,
            pushes=options.pushes,
            seed=options.seed,
            timeout=options.timeout,
            mixed_precision=options.mixed_precision,
        )
        yield from _rows(job)


def _source(job: Job, rank: int, say: Callable[[object], None]) -> None:
    from refit_sdk.demo.train import source_main

    source_main(job, rank, say)


def _target(job: Job, rank: int, say: Callable[[object], None]) -> None:
    from refit_sdk.demo.rollout import target_main

    target_main(job, rank, say)


def _rows(job: Job) -> Iterator[Row]:
    tally = Tally(job.sources, job.targets)
    with Crew() as crew:
        for rank in range(job.sources):
            crew.start(f"source[{rank}]", _source, job, rank)
        for rank in range(job.targets):
            crew.start(f"{ENGINE}[{rank}]", _target, job, rank)
        for name, said in crew.messages(timeout=job.timeout):
            if row := tally.add(name, said):
                yield row


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of 127.0.0.1 that stays reserved: bound here with SO_REUSEADDR and never listened on.

    The kernel hands such a port to nobody who asks for a free one, and lets the rendezvous, which sets SO_REUSEADDR
    too, listen on it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
