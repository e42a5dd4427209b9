"""The weight-transfer engine `refit` inside vLLM: `--weight-transfer-config '{"backend": "refit"}'`.

vLLM calls `register`, an entry point of `vllm.general_plugins`, in every process of an engine. Each worker then has an
engine of this module, which is a rank of a session:

1. init: join the session that `init_info` tells of. The token comes from the environment (REFIT_TOKEN,
   REFIT_TOKEN_FILE), never from `init_info`.
2. update: receive the version that the sources push. Whether it committed, the rendezvous tells who leads the engine.
3. shutdown: leave.

From the first byte of a push until it committed the model is fenced: its forward raises.

vLLM asks all workers at once, reads their answers in order, and stops at the first failure: answers behind it are then
taken for those to the next question. So a push that fails is logged here and not raised, and of a join that fails only
the last worker raises, as it fails on all. The class is made when vLLM asks for it, as its base is vLLM's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final

from refit_adapters.vllm import VllmModel
from refit_sdk.errors import RefitError

BACKEND: Final = "refit"
_CLASS: Final = "RefitWeightTransferEngine"
_LOG: Final = logging.getLogger("vllm.refit")


def register() -> None:
    """Make the backend known to vLLM, once a process. `RefitError` if another has its name."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    registry = WeightTransferEngineFactory._registry
    if BACKEND not in registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, _CLASS)
    elif getattr(registry[BACKEND](), "__module__", "") != __name__:
        raise RefitError(f"vLLM has another backend called {BACKEND!r}; uninstall it, or leave it out of VLLM_PLUGINS")


@dataclass
class InitInfo:
    """What an engine is told at connecting: plain data, and no secret."""

    rendezvous: str
    engine: str
    deadline: float = 120.0
    heartbeat: float = 15.0
    fabric: str = "mixed"
    checkpoint: str | None = None


@dataclass
class UpdateInfo:
    """What an engine is told for a push; or, with `reform`, for going on with those who are left."""

    version: int
    reform: bool = False


def __getattr__(name: str) -> Any:
    if name != _CLASS:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    made = _engine_class()
    globals()[_CLASS] = made
    return made


def _engine_class() -> Any:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    class RefitWeightTransferEngine(Worker, WeightTransferEngine):  # type: ignore[misc]
        """A worker's part in a session."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        supports_draft_weight_update = False

    RefitWeightTransferEngine.__module__ = __name__
    return RefitWeightTransferEngine


class Worker:
    """What vLLM asks of a weight-transfer engine, for one worker."""

    model: Any
    vllm_config: Any
    _session: Any = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join. A session that was there before is left."""
        self.shutdown()
        parallel = self.vllm_config.parallel_config
        try:
            self._session = self._join(init_info, *_place(parallel))
        except Exception:
            if parallel.rank == parallel.world_size - 1:
                raise
            _LOG.exception("this worker can't join the session %s", init_info.rendezvous)

    def _join(self, info: InitInfo, rank: int, size: int) -> Any:
        from refit_sdk.session import RefitSession

        model = VllmModel(self.model, config=self.vllm_config, checkpoint=info.checkpoint)
        return RefitSession.target(
            model,
            rendezvous=info.rendezvous,
            engine=info.engine,
            rank=rank,
            size=size,
            fabric=info.fabric,
            deadline=info.deadline,
            heartbeat=info.heartbeat,
        )

    def start_weight_update(self) -> None:
        """Nothing to do: a push begins when all ranks are ready for it."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take part in the sources' next push, or reform."""
        if self._session is None:
            _LOG.error("an update was asked for, and this worker isn't in a session")
            return
        try:
            if update_info.reform:
                self._session.reform()
            else:
                self._session.receive()
        except Exception:  # noqa: BLE001 - what an answer that fails does to those behind it is told above
            _LOG.exception("version %s wasn't received", update_info.version)

    def finish_weight_update(self) -> None:
        """Nothing to do: what was committed has been installed."""

    def shutdown(self) -> None:
        """Leave the session."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


def _place(parallel: Any) -> tuple[int, int]:
    """A worker's rank among all of the engine's, and how many there are."""
    within = int(parallel.world_size)
    return int(parallel.data_parallel_index) * within + int(parallel.rank), int(parallel.world_size_across_dp)
