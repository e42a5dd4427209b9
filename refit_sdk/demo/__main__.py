"""`python -m refit_sdk.demo`, the same as `refit demo`."""

from __future__ import annotations

from refit_sdk.cli.demo import demo

if __name__ == "__main__":
    demo()
