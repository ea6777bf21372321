"""`python -m tests.demo.router` before two small engines that only speak HTTP."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientError, web
from aiohttp.test_utils import TestClient, TestServer

from kvstore.core.errors import ConfigError
from tests.demo import router
from tests.demo.router import PATHS, Router, decode_leg, prefill_leg, read_engine
from tests.harness.patience import WAIT_S

HANDED = {"do_remote_prefill": True, "remote_request_id": "r", "remote_num_tokens": 64}
Answers = Callable[[web.Request], Awaitable[web.StreamResponse]]
BODY = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 20, "stream": True}


class Engine:
    """Answers what it is told to, and keeps what it was asked."""

    def __init__(self, answer: Answers) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self._answer = answer
        app = web.Application()
        for path in PATHS:
            app.router.add_post(path, self._serve)
        app.router.add_get("/v1/models", says({"data": [{"id": "m"}]}))
        self.server = TestServer(app)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers.append(request.headers)
        return await self._answer(request)

    @property
    def url(self) -> str:
        return str(self.server.make_url(""))


def says(body: Any, status: int = 200) -> Answers:  # noqa: ANN401 - JSON
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return answer


computes = says({"choices": [{"text": "a"}], "kv_transfer_params": HANDED})
hands_nothing = says({"choices": [{"text": "a"}], "kv_transfer_params": None})
breaks = says({"error": "out of memory"}, 500)
refuses = says({"error": {"message": "prompt too long"}}, 400)


async def babbles(_request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>")


async def streams(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_type = "text/event-stream"
    await response.prepare(request)
    for word in (b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n"):
        await response.write(word)
    return response


async def stops_half_way(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"data: one\n\n")
    assert request.transport is not None
    request.transport.abort()
    return response


class Rig:
    """A router, and the engines behind it."""

    def __init__(self, client: TestClient[Any, Any], prefill: Engine, decode: Engine) -> None:
        self.client, self.prefill, self.decode = client, prefill, decode

    async def post(self, path: str = PATHS[0], **more: Any) -> tuple[int, bytes]:  # noqa: ANN401 - of a body
        answer = await self.client.post(path, json=BODY | more)
        return answer.status, await answer.read()

    async def legs(self) -> dict[tuple[str, str], float]:
        text = await (await self.client.get("/metrics")).text()
        found = re.findall(
            r'^router_legs_total{leg="(\w+)",outcome="(\w+)"} (.*)', text, re.MULTILINE
        )
        return {(leg, outcome): float(value) for leg, outcome, value in found}


@asynccontextmanager
async def rig(prefill: Answers = computes, decode: Answers = streams) -> AsyncIterator[Rig]:
    one, two = Engine(prefill), Engine(decode)
    async with AsyncExitStack() as ends:
        for engine in (one, two):
            await ends.enter_async_context(engine.server)
        router = Router([one.url], [two.url])
        client = await ends.enter_async_context(TestClient(TestServer(router.app())))
        yield Rig(client, one, two)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make an asynchronous test one that pytest runs."""

    @functools.wraps(test)
    def run(*arguments: object, **fixtures: object) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


@pytest.mark.parametrize("path", PATHS)
@in_a_loop
async def test_a_prompt_is_computed_by_one_engine_and_continued_by_the_other(path: str) -> None:
    async with rig() as made:
        status, body = await made.post(path)
        assert (status, body) == (200, b"data: one\n\ndata: two\n\ndata: [DONE]\n\n")
        assert made.prefill.asked == [prefill_leg(BODY)]
        assert made.decode.asked == [BODY | {"kv_transfer_params": HANDED}]
        names = {h["X-Request-Id"] for h in made.prefill.headers + made.decode.headers}
        assert len(names) == 1, "one request in both engines' logs"
        assert await made.legs() == {("prefill", "ok"): 1, ("decode", "ok"): 1}


def test_the_first_leg_computes_the_prompt_and_one_token() -> None:
    chat = BODY | {"n": 3, "min_tokens": 5, "max_completion_tokens": 9, "stream_options": {}}
    leg = prefill_leg(chat)
    assert leg["kv_transfer_params"]["do_remote_decode"] is True
    assert (leg["max_tokens"], leg["max_completion_tokens"], leg["stream"]) == (1, 1, False)
    assert not {"n", "min_tokens", "stream_options"} & leg.keys()
    assert leg["prompt"] == BODY["prompt"]
    assert decode_leg(chat | {"kv_transfer_params": {"forged": 1}}, None) == chat


async def freezes(_request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(600)
    raise AssertionError


@pytest.mark.parametrize("prefill", [breaks, babbles, freezes, None])
@in_a_loop
async def test_a_prefill_engine_that_fails_or_is_dead_costs_a_computation(
    prefill: Answers | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.demo.router.PREFILL_S", 0.2 if prefill is freezes else WAIT_S)

    async with rig(prefill or computes) as made:
        if prefill is None:
            await made.prefill.server.close()
        assert (await made.post())[0] == 200
        assert made.decode.asked == [BODY]
        assert await made.legs() == {("prefill", "failed"): 1, ("decode", "ok"): 1}
    assert "the decode engine computes the prompt" in caplog.text


@in_a_loop
async def test_a_client_that_goes_away_ends_its_request_and_is_no_fault_of_the_engine() -> None:
    ended = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"data: more\n\n")
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    async with rig(decode=endless) as made:
        answer = await made.client.post(PATHS[0], json=BODY)
        assert await answer.content.readline() == b"data: more\n"
        answer.close()
        await asyncio.wait_for(ended.wait(), 600)
        assert await made.legs() == {("prefill", "ok"): 1, ("decode", "unread"): 1}


@pytest.mark.parametrize(
    ("prefill", "decode", "status", "legs"),
    [
        (hands_nothing, streams, 200, {("prefill", "nothing"): 1, ("decode", "ok"): 1}),
        (refuses, streams, 400, {("prefill", "refused"): 1}),
        (computes, refuses, 400, {("prefill", "ok"): 1, ("decode", "refused"): 1}),
    ],
)
@in_a_loop
async def test_what_an_engine_answers_is_counted_and_a_refusal_passed_on(
    prefill: Answers,
    decode: Answers,
    status: int,
    legs: dict[tuple[str, str], float],
) -> None:
    async with rig(prefill, decode) as made:
        found, body = await made.post()
        assert found == status
        if status == 400:
            assert json.loads(body) == {"error": {"message": "prompt too long"}}
        assert await made.legs() == legs


@in_a_loop
async def test_a_decode_engine_that_is_dead_is_said() -> None:
    async with rig() as made:
        url = made.decode.url.rstrip("/")
        await made.decode.server.close()
        for status, body in (await made.post(), await get(made.client, "/v1/models")):
            assert status == 502
            said = json.loads(body)["error"]["message"]
            assert said.startswith(f"decode engine {url} cannot be reached: ")
        assert (await made.legs())["decode", "failed"] == 1


async def get(client: TestClient[Any, Any], path: str) -> tuple[int, bytes]:
    answer = await client.get(path)
    return answer.status, await answer.read()


@in_a_loop
async def test_an_answer_that_breaks_off_is_no_whole_one() -> None:
    async with rig(decode=stops_half_way) as made:
        with pytest.raises(ClientError):
            await made.post()
        assert (await made.legs())["decode", "failed"] == 1


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"[" * 100_000, "no JSON"), (b"[]", "found list")],
    ids=["deep", "list"],
)
@in_a_loop
async def test_a_body_that_is_none_is_said(data: bytes, says: str) -> None:
    async with rig() as made:
        answer = await made.client.post(PATHS[0], data=data)
        assert answer.status == 400
        assert says in (await answer.json())["error"]["message"]
        assert not made.prefill.asked


@in_a_loop
async def test_engines_take_turns_and_keys_are_passed_on() -> None:
    engines = [Engine(computes) for _ in range(2)] + [Engine(streams) for _ in range(2)]
    async with AsyncExitStack() as ends:
        for engine in engines:
            await ends.enter_async_context(engine.server)
        urls = [engine.url for engine in engines]
        server = TestServer(Router(urls[:2], urls[2:]).app())
        client = await ends.enter_async_context(TestClient(server))
        for number in range(4):
            headers = {"Authorization": "Bearer k", "X-Request-Id": f"id {number}"}
            answer = await client.post(PATHS[0], json=BODY, headers=headers)
            assert answer.status == 200
        assert (await client.get("/health")).status == 200
        assert (await get(client, "/v1/models"))[0] == 200
    assert [len(engine.asked) for engine in engines] == [2, 2, 2, 2]
    assert [h["X-Request-Id"] for h in engines[0].headers] == ["id 0", "id 2"]
    assert all(h["Authorization"] == "Bearer k" for e in engines for h in e.headers)


@pytest.mark.parametrize("url", ["10.0.0.5:8000", "ftp://a", "http://", "http://a/v1"])
def test_what_is_no_engine_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected a URL such as"):
        read_engine(url)
    assert router.main(["--prefill", url, "--decode", url, "--listen", "127.0.0.1:0"]) == 2


def test_a_port_in_use_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ends = ["--prefill", "http://a:1", "--decode", "http://a:1", "--listen", address]
        assert router.main([*ends]) == 2
    assert f"router: error: --listen {address}: " in capsys.readouterr().err
