"""What `refit push` wrote, as a sentence or JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from refit_sdk.render.plan import size

if TYPE_CHECKING:
    from refit_sdk.exporting import Export
    from refit_sdk.report import PushReport


def _figures(export: Export, report: PushReport) -> dict[str, Any]:
    files = export.files()
    seconds = sum(report.seconds[stage] for stage in ("move", "install", "commit"))
    return {
        "directory": str(export.directory),
        "ranks": export.layout.size,
        "tensors": len(export.tensors),
        "files": len(files),
        "nbytes": sum(held.nbytes for file in files for held in file.tensors),
        "seconds": seconds,
    }


def sentence(export: Export, report: PushReport) -> str:
    """The result in a sentence."""
    told = _figures(export, report)
    ranks = f"{told['ranks']} ranks" if told["ranks"] > 1 else "one rank"
    rate = told["nbytes"] / max(told["seconds"], 1e-9) / 1e9
    return (
        f"{told['directory']}: {told['tensors']} tensors for {ranks}, {size(told['nbytes'])} in {told['files']} files, "
        f"{told['seconds']:.1f} s ({rate:.2f} GB/s)"
    )


def document(export: Export, report: PushReport) -> str:
    """The result as one JSON object."""
    return json.dumps(_figures(export, report), indent=2)
