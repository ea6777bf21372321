"""`python -m tests.demo.router` before two small engines that only speak HTTP."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from tests.demo.router import PATHS, Router, decode_leg, prefill_leg
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
