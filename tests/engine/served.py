"""An engine attached to a store of its own, and the KV events that it publishes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from tests.bench.engine import Engine, Request, Result
from tests.bench.store import StoreProcess
from tests.engine.support import (
    GROUPS,
    TOKENS_OUT,
    attach,
    eventually,
    is_attached,
    numbers,
    settled,
    since,
)

TICK_STEPS = 20


class Served:
    """A store, an engine attached to it, and the KV events that the engine publishes."""

    def __init__(
        self,
        name: str,
        model: Path,
        folder: Path,
        store: StoreProcess,
        **extra: Any,
    ) -> None:
        """extra: of the connector."""
        self._extra = extra
        self.name = name
        self.store = store
        self.groups = GROUPS[name]
        self._endpoint = f"ipc://{folder / 'events'}"
        self._model = model
        self._start()

    def _start(self) -> None:
        import zmq

        # A new one for each engine: one of before connects to it again, but was sent nothing.
        self._subscription: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._subscription.setsockopt(zmq.RECONNECT_IVL, 1)  # ms: a new engine soon says the first
        self._subscription.connect(self._endpoint)
        self._subscription.subscribe(b"")
        events = {"enable_kv_cache_events": True, "endpoint": self._endpoint}
        connector = attach(self.store, **self._extra)
        extra = {"kv_events_config": events}
        self.engine = Engine(self._model, connector=connector, extra=extra).__enter__()

    def restart(self) -> None:
        """End the engine and start another one."""
        self.close()
        self._start()

    def close(self) -> None:
        self.engine.close()
        self._subscription.close(0)

    def one_by_one(self, requests: Sequence[Request]) -> list[Result]:
        """So that what is shared with an earlier prompt is in the engine's own cache."""
        return [self.engine.run([one], max_tokens=TOKENS_OUT)[0] for one in requests]

    def stats(self) -> dict[str, float]:
        """The store's numbers once all copies are reported."""
        return settled(lambda: numbers(self.store.address))

    def since(self, before: dict[str, float]) -> dict[str, float]:
        return settled(lambda: since(self.store.address, before))

    def events(self) -> list[Any]:
        """What has been published since the last call, as vLLM's objects; arrives a step late.

        Of much at once a step publishes a part: the engine steps until nothing comes any more.
        """
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        found: list[Any] = []
        before = -1
        while len(found) > before:
            before = len(found)
            # Less than a block, so that it is none of the events.
            self.engine.run([Request(id="tick", tokens=[3, 4, 5])], max_tokens=TICK_STEPS)
            self.engine.go_idle()
            while self._subscription.poll(500):
                *_, payload = self._subscription.recv_multipart()
                found += decoder.decode(payload).events
        return found


class Node:
    """A store, and an engine attached to it, one of those that hand prompts over."""

    def __init__(self, model: Path, store: StoreProcess, ends: ExitStack, **extra: Any) -> None:
        """extra: of the connector."""
        self.store = ends.enter_context(store)
        self.engine = ends.enter_context(Engine(model, connector=attach(store, **extra)))
        self.address = store.address

    def run(self, requests: Sequence[Request], params: Sequence[Any], tokens: int) -> list[Result]:
        made = [
            msgspec.structs.replace(request, kv_transfer_params=given)
            for request, given in zip(requests, params, strict=True)
        ]
        results = self.engine.run(made, max_tokens=tokens)
        self.engine.go_idle()  # what the store has to be told is in its steps
        return results

    def restart(self) -> None:
        """Start the store again, under the same address."""
        self.store.stop()
        self.store.__enter__()

    def attached(self) -> None:
        """Wait until the engine is with its store."""
        eventually(lambda: is_attached(self.engine, self.address))
