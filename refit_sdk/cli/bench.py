"""`refit bench link`: how fast this machine copies, shares memory and, with a peer, sends; as a topology file."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import click

from refit_sdk.cluster import Cluster, Speeds, write
from refit_sdk.control import parse_rendezvous


@click.group()
def bench() -> None:
    """Measure this machine."""


@bench.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write a topology file with the speeds.")
@click.option("--peer", metavar="tcp://HOST:PORT", help="Measure the network to a host that serves.")
@click.option("--serve", metavar="tcp://HOST:PORT", help="Be the peer: take what comes at this address until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def link(*, out: Path | None, peer: str | None, serve: str | None, as_json: bool) -> None:
    """Measure copies, shared memory and the network, and write the topology file that plans read."""
    from refit_sdk import measuring

    if serve is not None:
        with measuring.serving(parse_rendezvous(serve)) as served:
            click.echo(f"serving at {serve}; Ctrl-C ends it", err=True)
            served.join()
        return
    address = None if peer is None else parse_rendezvous(peer)
    found: dict[str, int] = {}
    for name, take in measuring.measures(address):
        click.echo(f"measuring {name} …", err=True)
        found |= take()
    speeds = Speeds(**found)
    if out is not None:
        write(Cluster(speeds=speeds), out)
    if as_json:
        click.echo(json.dumps({"speeds": attrs.asdict(speeds), "measured": sorted(found)}))
        return
    for name, value in attrs.asdict(speeds).items():
        shown = f"{value / 1e9:.3g} GB/s" if name.endswith("bytes_per_s") else f"{value / 1e3:.3g} µs"
        told = "" if name in found else " (not measured)"
        click.echo(f"{name}: {shown}{told}")
