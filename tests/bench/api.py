"""A vLLM API server as a child process, and a client of it: engines as users run them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from tests.bench.engine import (
    CLOSE_TIMEOUT_S,
    LOG_TAIL_LINES,
    EngineFailed,
    environment,
    short_name,
)
from tests.bench.store import free_port, get, scraped

ANSWER_S = 600.0
MODEL_NAME = "model"


class Answer(msgspec.Struct, frozen=True):
    """What came back. ttft_s: from sending the request until its first token arrived."""

    tokens: list[int]
    ttft_s: float
    kv_transfer_params: dict[str, Any] | None = None


class ApiServer:
    """One vLLM engine behind its API server. Entering starts it; ready() says when it serves."""

    def __init__(
        self,
        name: str,
        model: Path,
        folder: Path,
        *,
        connector: dict[str, Any],
        block_size: int = 32,
        kv_cache_bytes: int = 64 << 20,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """folder: where its log goes. connector: a kv_transfer_config."""
        self.name = name
        self.port = free_port()
        self.log_path = folder / f"{name}.log"
        settings = {
            "model": os.fspath(model),
            "served-model-name": MODEL_NAME,
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": "bfloat16",
            "seed": 0,
            "block-size": block_size,
            "kv-cache-memory-bytes": kv_cache_bytes,
            "max-num-batched-tokens": 2048,
            "max-num-seqs": 16,
            "kv-transfer-config": json.dumps(connector),
        }
        given = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        flags = ["--skip-tokenizer-init", "--enforce-eager", "--disable-uvicorn-access-log"]
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *given, *flags]
        self._env = environment(in_process=False) | dict(env or {})
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        with self.log_path.open("wb") as sink:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its whole family can be ended together
                env=self._env,
            )
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def ready(self) -> bool:
        """Tell whether it answers. Raises EngineFailed, with the end of its log, if it ended."""
        if self._child is None or self._child.poll() is not None:
            lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            raise EngineFailed("\n".join([f"the {self.name} engine has ended", *lines]))
        try:
            return get(self.port, "/health", timeout_s=5.0)[0] == http.HTTPStatus.OK
        except OSError:
            return False

    def metrics(self) -> dict[str, float]:
        """Return vLLM's counters without the `vllm:` prefix, as `name{source=host}`."""
        found: dict[str, float] = {}
        for name, labels, value in scraped(self.port):
            found[short_name(name.removesuffix("_total"), labels)] = value
        return found

    def end(self) -> None:
        """Ask it to end, and do not wait for that."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End it; safe to call twice."""
        self.end()
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(CLOSE_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def complete(port: int, body: dict[str, Any]) -> Answer:
    """Ask a server for a completion. body: of /v1/completions; `stream` as it likes.

    Raises EngineFailed for anything but an answer.
    """
    asked = {"model": MODEL_NAME, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    asked |= {"stream": True, **body}
    began_s = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    with contextlib.closing(connection):
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(asked), headers)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise EngineFailed(f"status {answer.status}: {answer.read()[:500].decode()}")
            return _streamed(answer, began_s) if asked["stream"] else _whole(answer, began_s)
        except (OSError, http.client.HTTPException) as exc:
            raise EngineFailed(f"no whole answer at port {port}: {exc}") from exc


def _whole(answer: http.client.HTTPResponse, began_s: float) -> Answer:
    found = json.loads(answer.read())
    taken_s = time.perf_counter() - began_s
    return Answer(found["choices"][0]["token_ids"], taken_s, found.get("kv_transfer_params"))


def _streamed(answer: http.client.HTTPResponse, began_s: float) -> Answer:
    """Read server-sent events up to [DONE]."""
    tokens: list[int] = []
    ttft_s = 0.0
    for line in answer:
        data = line.removeprefix(b"data: ").strip()
        if not data or data == b"[DONE]":
            continue
        choices = json.loads(data).get("choices")
        if choices is None:
            raise EngineFailed(f"in the stream: {data[:500].decode()}")
        new = choices[0].get("token_ids") if choices else None
        if new and not tokens:
            ttft_s = time.perf_counter() - began_s
        tokens += new or []
    return Answer(tokens, ttft_s)
