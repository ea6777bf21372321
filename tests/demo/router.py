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
        self._legs = Counter(
            "router_legs",
            "Requests passed on, by leg and outcome.",
            ["leg", "outcome"],
            registry=self._registry,
        )
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """Return the server's paths."""
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.cleanup_ctx.append(self._connections)
        for path in PATHS:
            app.router.add_post(path, self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _connections(self, _app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._session:
            yield

    @property
    def _engines(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise web.HTTPServiceUnavailable(text="the router is starting or ending")
        return self._session

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await _body_of(request)
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
        engine = next(self._prefill)
        limit = aiohttp.ClientTimeout(total=PREFILL_S, sock_connect=CONNECT_S)
        try:
            async with self._engines.post(
                engine + path, json=leg, headers=headers, timeout=limit
            ) as answer:
                data = await answer.read()
                if answer.status in _CLIENT_ERRORS and answer.status != _BUSY:
                    self._legs.labels("prefill", "refused").inc()
                    return web.Response(
                        body=data, status=answer.status, content_type=answer.content_type
                    )
                answer.raise_for_status()
                found = json.loads(data).get("kv_transfer_params")
        except (
            *(aiohttp.ClientError, TimeoutError),
            *(ValueError, AttributeError, RecursionError),  # no JSON, another one, one too deep
        ) as exc:
            log.warning(
                "prefill engine %s: %s; the decode engine computes the prompt", engine, _text(exc)
            )
            self._legs.labels("prefill", "failed").inc()
            return None
        handed = isinstance(found, dict)
        self._legs.labels("prefill", "ok" if handed else "nothing").inc()
        return found if handed else None

    async def _decode_leg(
        self, request: web.Request, leg: dict[str, Any], headers: dict[str, str]
    ) -> web.StreamResponse:
        """Pass an engine's answer on as it comes."""
        engine = next(self._decode)
        response: web.StreamResponse | None = None
        try:
            async with self._engines.post(
                engine + request.path, json=leg, headers=headers
            ) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
        except asyncio.CancelledError:  # the client has gone
            self._legs.labels("decode", "unread").inc()
            raise
        except (aiohttp.ClientError, TimeoutError) as exc:
            if request.transport is None or request.transport.is_closing():
                self._legs.labels("decode", "unread").inc()
                raise
            log.warning("decode engine %s: %s", engine, _text(exc))
            self._legs.labels("decode", "failed").inc()
            if response is None or not response.prepared:
                return _error(502, f"decode engine {engine} cannot be reached: {_text(exc)}")
            request.transport.abort()  # a part has been sent: the client must see a break
            return response
        outcome = "ok" if response.status < min(_CLIENT_ERRORS) else "refused"
        self._legs.labels("decode", outcome).inc()
        return response

    async def _models(self, _request: web.Request) -> web.Response:
        engine = next(self._decode)
        try:
            async with self._engines.get(f"{engine}/v1/models") as answer:
                return web.Response(
                    body=await answer.read(),
                    status=answer.status,
                    content_type=answer.content_type,
                )
        except (aiohttp.ClientError, TimeoutError) as exc:
            return _error(502, f"decode engine {engine} cannot be reached: {_text(exc)}")

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), content_type="text/plain")


async def _body_of(request: web.Request) -> dict[str, Any]:
    """Return a request's JSON object; raise an answer that says what is wrong with it."""
    try:
        found = json.loads(await request.read())
    except (ValueError, RecursionError) as exc:
        raise web.HTTPBadRequest(
            text=_message(f"the body is no JSON: {exc}", 400), content_type="application/json"
        ) from exc
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise web.HTTPBadRequest(
            text=_message(f"expected a JSON object, found {kind}", 400),
            content_type="application/json",
        )
    return found


def _message(text: str, status: int) -> str:
    """Return an error as OpenAI's clients expect it."""
    return json.dumps({"error": {"message": text, "type": "router_error", "code": status}})


def _error(status: int, text: str) -> web.Response:
    return web.Response(text=_message(text, status), status=status, content_type="application/json")


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
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as exc:
            raise ConfigError(f"--listen {host}:{port}: {exc.strerror}") from exc
        at = runner.addresses[0]
        print(f"router at http://{at[0]}:{at[1]}", flush=True)
        await stop.wait()
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
        parser.add_argument(
            f"--{side}",
            action="append",
            required=True,
            metavar="URL",
            help=f"API server of a {side} engine; may be given several times",
        )
    parser.add_argument(
        "--listen",
        default="127.0.0.1:8000",
        metavar="HOST:PORT",
        help="where to serve, port 0 for a free one (default: 127.0.0.1:8000)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
