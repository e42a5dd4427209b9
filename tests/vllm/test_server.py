"""A vLLM behind HTTP, started as its users start it, led by a driver that has no model."""

import concurrent.futures
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import engines
import pytest
import sources
import tiny
from refit_adapters.vllm_control import VllmServer

from refit_sdk.controller import RefitController
from refit_sdk.errors import RefitError

PLUGIN = Path(__file__).parent / "support" / "plugin"
SECRET = "a secret that nobody may see"


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return [tiny.save("qwen3", folder / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def server(versions, tmp_path_factory):
    """Its address, and the file that everything it says goes to."""
    port = int(engines.rendezvous().rpartition(":")[2])
    said = tmp_path_factory.mktemp("server") / "log"
    environ = {
        **os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "REFIT_TEST_UNPACKED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PLUGIN), os.environ.get("PYTHONPATH", "")])),
        "REFIT_TOKEN": SECRET, "VLLM_LOGGING_LEVEL": "DEBUG",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(versions[0]),
        "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--enforce-eager", "--tokens-only", "--max-model-len", "128", "--max-num-seqs", "8",
        "--tensor-parallel-size", "2",
        "--weight-transfer-config", '{"backend": "refit"}',
    ]  # fmt: skip
    with said.open("w") as out:
        process = subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, process, said)
            yield url, said
        finally:
            process.terminate()
            process.wait(60)


def wait_for(url, process, said):
    end = time.monotonic() + 200
    while time.monotonic() < end:
        assert process.poll() is None, said.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1)
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise AssertionError(said.read_text()[-3000:])


def post(url, **body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as answer:
        return json.loads(answer.read() or b"null")


def generated(url, prompt, length=tiny.LENGTH):
    sampling = {"temperature": 0, "max_tokens": length, "ignore_eos": True, "detokenize": False}
    found = post(f"{url}/inference/v1/generate", model="m", token_ids=prompt, sampling_params=sampling)
    return found["choices"][0]["token_ids"]


def test_a_driver_leads_a_server_of_two_workers_while_it_serves(server, versions, tmp_path, monkeypatch):
    url, said = server
    wanted = [tiny.tokens(path) for path in versions]
    assert [generated(url, prompt) for prompt in tiny.PROMPTS] == wanted[0]
    monkeypatch.setenv("REFIT_TOKEN", SECRET)
    live = tmp_path / "live"
    sources.put(versions[1], live)
    engine = VllmServer(url, engine="rollout-0")
    with (
        RefitController(rendezvous="tcp://127.0.0.1:0", engines=[engine], deadline=60) as controller,
        sources.sources(live, controller.rendezvous, size=2, engines=["rollout-0"]) as pushing,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        pushing.answers("joined")
        for number, choice in enumerate((1, 0, 1), start=1):
            sources.put(versions[choice], live)
            running = [pool.submit(generated, url, prompt, 100) for prompt in tiny.PROMPTS]
            with controller.update(version=number):
                pushing.ask(number)
                pushing.answers("pushed")
            assert [len(each.result(100)) for each in running] == [100] * len(running)
            assert [generated(url, prompt) for prompt in tiny.PROMPTS] == wanted[choice]
            with urllib.request.urlopen(f"{url}/weight_info") as answer:
                assert json.loads(answer.read())["weight_version"] == str(number)
    assert SECRET not in said.read_text()


def test_a_server_that_sleeps_or_was_paused_by_somebody_is_refused(server):
    url, _ = server
    engine = VllmServer(url)
    engine.check()
    with pytest.raises(RefitError, match="it never joined, was restarted since, or another pushes to it"):
        engine.pause_now()
    engine._label = engine._version()
    post(f"{url}/pause?mode=keep")
    try:
        with pytest.raises(RefitError, match="paused or asleep, and not by this session"):
            engine.pause_now()
    finally:
        post(f"{url}/resume")


class WithoutDevMode(http.server.BaseHTTPRequestHandler):
    """A fake of a server that is healthy and has no routes for weights."""

    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args):
        pass


def test_a_server_without_dev_mode_is_told_apart():
    with http.server.HTTPServer(("127.0.0.1", 0), WithoutDevMode) as fake:
        threading.Thread(target=fake.serve_forever, daemon=True).start()
        try:
            with pytest.raises(RefitError, match="start it with VLLM_SERVER_DEV_MODE=1"):
                VllmServer(f"http://127.0.0.1:{fake.server_port}").check()
        finally:
            fake.shutdown()


def test_a_server_that_is_not_there_is_tried_again_and_named():
    begun = time.monotonic()
    with pytest.raises(RefitError, match=re.escape("http://127.0.0.1:9/health can't be reached")):
        VllmServer("http://127.0.0.1:9").check()
    assert time.monotonic() - begun > 0.5


@pytest.mark.parametrize(
    "url", ["10.0.0.7:8000", "ftp://h", "http://h/path", "http://user:word@h", "http://h?x=1", "file:///etc/passwd"]
)
def test_addresses_that_are_none_of_a_server_are_refused(url):
    with pytest.raises(RefitError, match="is not the address of a server"):
        VllmServer(url)
