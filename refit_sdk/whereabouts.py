"""Where this process is, as it says at joining: its host, and its domain where it knows of one.

1. The host is what processes have in common that can share memory (`refit_sdk.sharing.this_host`), told apart by the
   host that the fabric was given, or REFIT_HOST, where one is stated.
2. The domain is REFIT_DOMAIN; else the NVLink fabric that the GPU of this process says it is in, which may be larger
   than a host; else nothing: the host is the domain.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from typing import Any, Final

from refit_sdk.messages import Where
from refit_sdk.sharing import this_host

COMPLETED: Final = 3
"""`NVML_GPU_FABRIC_STATE_COMPLETED`."""


def whereabouts(fabric: object) -> Where:
    """Where this process is. A fabric that has one says by `host` which host it was given."""
    stated = str(getattr(fabric, "host", None) or os.environ.get("REFIT_HOST", ""))
    found = this_host().partition("/")[2] or socket.gethostname()
    return Where(host=f"{stated}/{found}" if stated else found, domain=os.environ.get("REFIT_DOMAIN", "") or nvlink())


class _FabricInfo(ctypes.Structure):
    """`nvmlGpuFabricInfo_t`."""

    _fields_ = [
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    ]  # fmt: skip


def nvlink() -> str:
    """The NVLink fabric that this process's GPU is in, as cluster and clique; "" where there is none, or none is used.

    NVML is loaded only if this process has begun to use a GPU.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return _asked(library, uuid.encode())


def _asked(library: Any, uuid: bytes) -> str:
    """What NVML says of a GPU, or nothing: drivers before 535 don't know fabrics."""
    ask = getattr(library, "nvmlDeviceGetGpuFabricInfo", None)
    if ask is None or library.nvmlInit_v2():
        return ""
    try:
        device, info = ctypes.c_void_p(), _FabricInfo()
        if library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(device)) or ask(device, ctypes.byref(info)):
            return ""
        cluster = bytes(info.cluster)
        return f"nvlink {cluster.hex()}/{info.clique}" if info.state == COMPLETED and any(cluster) else ""
    finally:
        library.nvmlShutdown()
