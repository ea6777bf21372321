"""An HTTP proxy that sends each prompt to a prefill and then to a decode engine.

    client --> router --prompt, one token, do_remote_decode--> prefill engine
                  <------------- kv_transfer_params -------------
                  ----------- prompt, kv_transfer_params ------> decode engine
    client <------------------- its answer, as it comes ---------

For demonstrations and tests: engines take turns, whatever their load. What it does in a hand-over
is what vLLM's own routers do. When the first leg fails, the second goes without parameters, and
the decode engine computes the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, generate_latest

from kvstore.core.errors import ConfigError

log = logging.getLogger(__name__)

PORT_MAX = (1 << 16) - 1
_TEXT = """\
A small HTTP proxy before prefill and decode engines, for demonstrations and tests. For production
take a router that knows the load of its engines: vLLM's own, llm-d, or the one you have. All of
them pass along the parameters that a hand-over needs.

It serves /v1/completions and /v1/chat/completions. Each request goes to a prefill engine first,
for one token, and then to a decode engine with the parameters that came back; its answer is passed
on as it comes. When a prefill engine fails, the decode engine computes the prompt. Engines take
turns. /metrics counts the legs.
"""
_EXAMPLE = """\
example:
  python -m tests.demo.router --prefill http://10.0.0.5:8000 --decode http://10.0.0.6:8000
"""
PATHS = ("/v1/completions", "/v1/chat/completions")
CONNECT_S = 5.0
PREFILL_S = 300.0  # of an engine that has frozen; a long prompt in a long queue takes less
BODY_BYTES_MAX = 64 << 20
REQUEST_ID, AUTHORIZATION = "X-Request-Id", "Authorization"
_BUSY = 429
_CLIENT_ERRORS = range(400, 500)
# What only makes sense for more than one token, or for an answer that somebody reads.
_OF_ANSWERS = ("stream_options", "min_tokens", "n", "best_of", "kv_transfer_params")
_LOST = (aiohttp.ClientError, TimeoutError)


def prefill_leg(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request that computes a prompt for another engine, and one token."""
    leg = {name: value for name, value in body.items() if name not in _OF_ANSWERS}
    leg |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in leg:  # a chat's newer name, which goes first
        leg["max_completion_tokens"] = 1
    leg["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    return leg


def decode_leg(body: Mapping[str, Any], params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a client's request with what the prefill engine handed over; None: nothing."""
    leg = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    return leg if params is None else {**leg, "kv_transfer_params": dict(params)}


def read_engine(url: str) -> str:
    """Check an engine's URL and return its beginning. Raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ConfigError(f"engine {url}: expected a URL such as http://10.0.0.5:8000")
    return f"{parts.scheme}://{parts.netloc}"


class Router:
    """Passes requests on. One event loop; nothing is kept between requests but counts."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        """prefill, decode: URLs of engines' API servers. Raises ConfigError."""
        self._prefill = itertools.cycle([read_engine(url) for url in prefill])
        self._decode = itertools.cycle([read_engine(url) for url in decode])
        self._registry = CollectorRegistry(auto_describe=False)
        text = "Requests passed on, by leg and outcome."
        self._legs = Counter("router_legs", text, ["leg", "outcome"], registry=self._registry)
        self._engines: aiohttp.ClientSession  # while it serves

    def app(self) -> web.Application:
        """Return the server's paths."""
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.cleanup_ctx.append(self._connections)
        app.add_routes([web.post(path, self._complete) for path in PATHS])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _connections(self, _app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._engines:
            yield

    def _count(self, leg: str, outcome: str) -> None:
        self._legs.labels(leg, outcome).inc()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as exc:
            return _error(400, f"the body is no JSON: {exc}")
        if not isinstance(body, dict):
            return _error(400, f"expected a JSON object, found {type(body).__name__}")
        headers = {REQUEST_ID: request.headers.get(REQUEST_ID) or uuid.uuid4().hex}
        if AUTHORIZATION in request.headers:
            headers[AUTHORIZATION] = request.headers[AUTHORIZATION]
        params = await self._prefill_leg(request.path, prefill_leg(body), headers)
        if isinstance(params, web.Response):
            return params
        return await self._decode_leg(request, decode_leg(body, params), headers)

    async def _prefill_leg(
        self, path: str, leg: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | web.Response | None:
        """Return what a prefill engine hands over, None for nothing, or its complaint."""
        url = next(self._prefill) + path
        limit = aiohttp.ClientTimeout(total=PREFILL_S, sock_connect=CONNECT_S)
        try:
            async with self._engines.post(url, json=leg, headers=headers, timeout=limit) as answer:
                if answer.status in _CLIENT_ERRORS and answer.status != _BUSY:
                    self._count("prefill", "refused")
                    return await _copied(answer)
                answer.raise_for_status()
                found = json.loads(await answer.read()).get("kv_transfer_params")
        # No JSON, another one, one too deep.
        except (*_LOST, ValueError, AttributeError, RecursionError) as exc:
            text = "prefill engine %s: %s; the decode engine computes the prompt"
            log.warning(text, url, _text(exc))
            self._count("prefill", "failed")
            return None
        handed = isinstance(found, dict)
        self._count("prefill", "ok" if handed else "nothing")
        return found if handed else None

    async def _decode_leg(
        self, request: web.Request, leg: dict[str, Any], headers: dict[str, str]
    ) -> web.StreamResponse:
        """Pass an engine's answer on as it comes."""
        engine = next(self._decode)
        response = web.StreamResponse()
        try:
            url = engine + request.path
            async with self._engines.post(url, json=leg, headers=headers) as answer:
                response.set_status(answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
        except (asyncio.CancelledError, *_LOST) as exc:
            cancelled = isinstance(exc, asyncio.CancelledError)
            if cancelled or request.transport is None or request.transport.is_closing():
                self._count("decode", "unread")  # the client has gone
                raise
            log.warning("decode engine %s: %s", engine, _text(exc))
            self._count("decode", "failed")
            if not response.prepared:
                return _unreachable(engine, exc)
            request.transport.abort()  # a part has been sent: the client must see a break
            return response
        self._count("decode", "ok" if response.status < min(_CLIENT_ERRORS) else "refused")
        return response

    async def _models(self, _request: web.Request) -> web.Response:
        engine = next(self._decode)
        try:
            async with self._engines.get(f"{engine}/v1/models") as answer:
                return await _copied(answer)
        except _LOST as exc:
            return _unreachable(engine, exc)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), content_type="text/plain")


async def _copied(answer: aiohttp.ClientResponse) -> web.Response:
    body = await answer.read()
    return web.Response(body=body, status=answer.status, content_type=answer.content_type)


def _error(status: int, text: str) -> web.Response:
    """Return an error as OpenAI's clients expect it."""
    error = {"message": text, "type": "router_error", "code": status}
    return web.json_response({"error": error}, status=status)


def _unreachable(engine: str, exc: BaseException) -> web.Response:
    return _error(502, f"decode engine {engine} cannot be reached: {_text(exc)}")


def _text(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__


async def serve(prefill: Sequence[str], decode: Sequence[str], host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError for an address that is taken."""
    router, stop = Router(prefill, decode), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(router.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        at = runner.addresses[0]
        print(f"router at http://{at[0]}:{at[1]}", flush=True)
        await stop.wait()
    except OSError as exc:
        raise ConfigError(f"--listen {host}:{port}: {exc.strerror}") from exc
    finally:
        await runner.cleanup()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    chosen = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    host, _, port = chosen.listen.rpartition(":")
    try:
        if not port.isdecimal() or int(port) > PORT_MAX:
            raise ConfigError(f"--listen: expected HOST:PORT, found {chosen.listen!r}")
        asyncio.run(serve(chosen.prefill, chosen.decode, host.strip("[]"), int(port)))
    except ConfigError as exc:
        print(f"router: error: {exc}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.demo.router",
        description=_TEXT,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for side in ("prefill", "decode"):
        text = f"API server of a {side} engine; may be given several times"
        parser.add_argument(f"--{side}", action="append", required=True, metavar="URL", help=text)
    text = "where to serve, port 0 for a free one (default: 127.0.0.1:8000)"
    parser.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
