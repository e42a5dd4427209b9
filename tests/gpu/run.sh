#!/usr/bin/env bash
# The fabrics of CUDA memory on this machine's GPU, in under five minutes. Nothing is installed: it takes a Python with a
# CUDA build of torch and what refit_sdk needs (attrs, msgspec, pluggy, numpy), PYTHON=... where it isn't `python3`.
#
# Leaves with 0 if all that could be run held, 1 if something didn't, 3 if nothing could be run.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
export PYTHONPATH="$root:$root/backends:$root/adapters:$here:$here/../moving${PYTHONPATH:+:$PYTHONPATH}"
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
exec timeout --kill-after=10 290 "${PYTHON:-python3}" "$here/checks.py" "$@"
