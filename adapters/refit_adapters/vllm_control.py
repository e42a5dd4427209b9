"""Controls of a vLLM that runs: `VllmServer(url)` by its HTTP routes, `VllmEngine(llm)` by an object in this process.

Both are given to a session as engines: `RefitSession.source(model, engines=[VllmServer("http://host:8000")])`.

- `pause`: what becomes of running requests: `"keep"` (frozen, they go on after the push), `"wait"` (ended first) or
  `"abort"`.
- `caches`: `"reset"` empties the prefix, multimodal and encoder caches after a push; `"keep"` leaves them, so that what
  older weights computed goes on being used.
- `checkpoint`: a directory, on the engine's host, that says which tensors there are; by default, the engine's model.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Literal
from urllib.parse import urlencode, urlsplit

from refit_sdk import asked
from refit_sdk.adapter import EngineControl
from refit_sdk.errors import RefitError
from refit_sdk.hookspecs import hookimpl

Pause = Literal["keep", "wait", "abort"]
Caches = Literal["reset", "keep"]
_PAUSES: Final = ("keep", "wait", "abort")
_TRIES: Final = 3
_DEV_MODE: Final = "VLLM_SERVER_DEV_MODE=1"


class _Control:
    """What both kinds of control have in common. `_ask` and `_tell` are theirs."""

    def __init__(self, *, engine: str, pause: Pause, caches: Caches, checkpoint: str | None) -> None:
        self.engine = asked.engine(engine)
        if pause not in _PAUSES:
            raise RefitError(f"pause={pause!r} is not a way to pause: pass one of {', '.join(_PAUSES)}")
        if caches not in ("reset", "keep"):
            raise RefitError(f"caches={caches!r} is not a policy: pass 'reset' or 'keep'")
        self._pause, self._caches, self._checkpoint = pause, caches, checkpoint
        self._paused = False
        self._label: str | None = None

    def connect(self, *, info: Mapping[str, Any]) -> None:
        """Have every worker join."""
        own = {"checkpoint": self._checkpoint} if self._checkpoint is not None else {}
        self._call("init_weight_transfer_engine", init_info={**info, **own})
        self._label = self._version()

    def pause_now(self) -> None:
        """Pause, and have every worker ready to receive. If that can't be, the engine serves on."""
        label = self._version()
        if self._label is None or label != self._label:
            raise RefitError(
                f"it serves version {label!r}, and {self._label!r} is what this session left it with: it never joined, "
                f"was restarted since, or another pushes to it; open a new session"
            )
        if not self._paused and self._is_asleep():
            raise RefitError(
                "it is paused or asleep, and not by this session: wake it up or resume it first, then push again"
            )
        self.pause(mode=self._pause)
        self._call("start_weight_update")

    def disconnect(self) -> None:
        """Have every worker leave."""
        self._call("shutdown_weight_transfer_engine")

    def update(self, *, version: int, info: Mapping[str, Any]) -> None:
        """Receive on every worker; returns once all of them have ended their part, well or not."""
        self._call("update_weights", update_info={"version": version, **info})

    def finish(self, *, version: int) -> None:
        """Label the engine with the version."""
        self._call("finish_weight_update", weight_version=str(version))
        self._label = str(version)

    def refresh_caches(self) -> None:
        """Empty the caches, unless they're kept. Frozen requests begin anew, with what they have generated."""
        if self._caches == "reset":
            if not self._reset_prefix_cache():
                raise RefitError("its prefix cache can't be emptied: something still holds blocks of it")
            self._call("reset_mm_cache")
            self._call("reset_encoder_cache")

    def fence(self, reason: str) -> None:
        """Stay paused, as the engine is during a push; its workers have fenced themselves. vLLM's update is ended."""
        self._call("finish_weight_update")

    def pause(self, *, mode: str) -> None:
        """Pause."""
        raise NotImplementedError

    def resume(self) -> None:
        """Serve again."""
        raise NotImplementedError

    def _is_asleep(self) -> bool:
        raise NotImplementedError

    def _reset_prefix_cache(self) -> bool:
        raise NotImplementedError

    def _version(self) -> str:
        raise NotImplementedError

    def _call(self, verb: str, **arguments: Any) -> Any:
        raise NotImplementedError


class VllmServer(_Control):
    """A vLLM behind HTTP, started with `VLLM_SERVER_DEV_MODE=1` and the weight-transfer backend `refit`."""

    name: ClassVar[str] = "vllm-server"

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        engine: str | None = None,
        pause: Pause = "keep",
        caches: Caches = "reset",
        checkpoint: str | None = None,
        api_key: str | None = None,
        deadline: float = 300.0,
    ) -> None:
        """`engine` is its name in the session, host and port by default. `deadline`: seconds for one answer."""
        self._url = _base(url)
        super().__init__(
            engine=engine or urlsplit(self._url).netloc.translate(str.maketrans("[]", "..")),
            pause=pause,
            caches=caches,
            checkpoint=checkpoint,
        )
        self._key = api_key
        self._deadline = asked.seconds(deadline, "deadline")

    def check(self) -> None:
        """Whether it's there, and has the routes."""
        self._http("GET", "/health", tries=_TRIES)
        try:
            self._http("GET", "/weight_info")
        except RefitError as error:
            if "404" in str(error):
                raise RefitError(
                    f"{self._url} doesn't offer weight updates: start it with {_DEV_MODE} in its environment"
                ) from None
            raise

    def pause(self, *, mode: str) -> None:
        """Pause, with the caches left for later."""
        self._http("POST", "/pause?" + urlencode({"mode": mode, "clear_cache": "false"}))
        self._paused = True

    def resume(self) -> None:
        """Serve again."""
        self._http("POST", "/resume")
        self._paused = False

    def _is_asleep(self) -> bool:
        return bool(self._http("GET", "/is_sleeping").get("is_sleeping"))

    def _version(self) -> str:
        return str(self._http("GET", "/weight_info").get("weight_version"))

    def _reset_prefix_cache(self) -> bool:
        return bool(self._http("POST", "/reset_prefix_cache?reset_running_requests=true").get("success"))

    def _call(self, verb: str, **arguments: Any) -> Any:
        return self._http("POST", f"/{verb}", body=arguments)

    def _http(self, method: str, path: str, *, body: Mapping[str, Any] | None = None, tries: int = 1) -> dict[str, Any]:
        """One request. `RefitError` with what the server says. Only connecting is tried again."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers=headers, method=method)
        for attempt in range(tries):
            try:
                with _OPENER.open(request, timeout=self._deadline) as answer:
                    text = answer.read()
                return dict(json.loads(text)) if text.startswith(b"{") else {}
            except urllib.error.HTTPError as error:
                said = error.read().decode(errors="replace")[:2000]
                raise RefitError(f"{self._url}{path} answered {error.code}: {said}") from None
            except OSError as error:
                if attempt + 1 == tries:
                    raise RefitError(f"{self._url}{path} can't be reached: {error}") from error
                time.sleep(0.2 * 2**attempt)
        raise AssertionError("every attempt returns or raises")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A server that sends us elsewhere isn't followed."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_OPENER: Final = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))


def _base(url: str) -> str:
    """The address of a server, checked.

    >>> _base("http://10.0.0.7:8000/")
    'http://10.0.0.7:8000'
    """
    parts = urlsplit(url)
    bare = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in ("http", "https") or not parts.hostname or not bare:
        raise RefitError(f"url={url!r} is not the address of a server: pass something like 'http://10.0.0.7:8000'")
    return f"{parts.scheme}://{parts.netloc}"


class VllmEngine(_Control):
    """An `LLM`, or an `AsyncLLM` with its event loop, in this process. An `LLM` serves nobody between its calls."""

    name: ClassVar[str] = "vllm-engine"

    def __init__(
        self,
        llm: Any = None,
        *,
        engine: str = "vllm",
        pause: Pause = "keep",
        caches: Caches = "reset",
        checkpoint: str | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`loop`: the running loop of an `AsyncLLM`; pushes are made from another thread than its own."""
        super().__init__(engine=engine, pause=pause, caches=caches, checkpoint=checkpoint)
        self._llm, self._loop = llm, loop

    def check(self) -> None:
        """Whether it was started with the backend."""
        config = getattr(getattr(self._llm, "llm_engine", self._llm), "vllm_config", None)
        stated = getattr(config, "weight_transfer_config", None)
        if stated is None or stated.backend != "refit":
            found = "no weight transfer" if stated is None else f"the backend {stated.backend!r}"
            raise RefitError(
                f"{type(self._llm).__name__} has {found}: make it with weight_transfer_config={{'backend': 'refit'}}"
            )

    def pause(self, *, mode: str) -> None:
        """Pause the scheduler; weights stay where they are."""
        if hasattr(self._llm, "pause_generation"):
            self._run(self._llm.pause_generation, mode=mode, clear_cache=False)
        else:
            self._run(self._llm.sleep, level=0, mode=mode)
        self._paused = True

    def resume(self) -> None:
        """Schedule again."""
        if hasattr(self._llm, "resume_generation"):
            self._run(self._llm.resume_generation)
        else:
            self._run(self._llm.wake_up, tags=["scheduling"])
        self._paused = False

    def _is_asleep(self) -> bool:
        return bool(self._run(getattr(self._llm, "llm_engine", self._llm).is_sleeping))

    def _version(self) -> str:
        return str(self._run(self._llm.get_weight_version))

    def _reset_prefix_cache(self) -> bool:
        return bool(self._call("reset_prefix_cache", reset_running_requests=True))

    def _call(self, verb: str, **arguments: Any) -> Any:
        if verb in ("init_weight_transfer_engine", "update_weights"):
            return self._run(getattr(self._llm, verb), self._request(verb, arguments))
        owner = self._llm if hasattr(self._llm, verb) else self._llm.llm_engine
        return self._run(getattr(owner, verb), **arguments)

    @staticmethod
    def _request(verb: str, arguments: Mapping[str, Any]) -> Any:
        from vllm.distributed.weight_transfer import base

        kind = base.WeightTransferInitRequest if verb.startswith("init") else base.WeightTransferUpdateRequest
        return kind(**arguments)

    def _run(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            made = verb(*args, **kwargs)
            if not inspect.isawaitable(made):
                return made
            if self._loop is None:
                raise RefitError(f"{type(self._llm).__name__} is asynchronous: pass loop=, the loop that it runs in")
            return asyncio.run_coroutine_threadsafe(_awaited(made), self._loop).result()
        except RefitError:
            raise
        except Exception as error:
            raise RefitError(f"{getattr(verb, '__name__', verb)} failed: {type(error).__name__}: {error}") from error


async def _awaited(made: Any) -> Any:
    return await made


@hookimpl
def refit_register_engine_controls() -> list[type[EngineControl]]:
    """The controls of this module."""
    return [VllmEngine, VllmServer]
