"""`make demo-pd`: one vLLM engine computes prompts, two others go on with them from its KV.

A prefill engine and two decode engines, each with a private store, and a router in front.
One decode engine pulls blocks, the other has them pushed. Each gets a prompt that nobody has seen,
the next turn of that conversation, a prompt whose beginning it has, and one that the prefill node
has on disk only by then. The exit status is 0 only if all outputs are those of an engine alone and
every token's KV came from where it had to.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import msgspec
from rich.console import Console

from kvstore.core.errors import KVStoreError
from kvstore.store import admin
from tests.bench.api import Answer, ApiServer, complete
from tests.bench.engine import tiered
from tests.bench.models import make_model, prompt
from tests.bench.store import numbers, scraped
from tests.demo.router import decode_leg, prefill_leg
from tests.demo.stage import Demo, table

BLOCK_TOKENS = 64
PROMPT_TOKENS = 4000
TURN_TOKENS = 500  # that a next turn adds
KNOWN_TOKENS = 2000  # that a decode node has of a prompt's beginning
OUTPUT_TOKENS = 8
# Where these prompts and that next turn continue, the second best token is at least 0.56 behind in
# logits: rounding, which differs between a short and a long forward pass, cannot turn it.
COLD_SEED, TURN_SEED, KNOWN_SEED, STORED_SEED = 285, 1017, 298, 178
WAYS = ("pull", "push")  # each with a cache salt of its own: what one computed the other has not
CAPACITY = "64MiB"  # of each store's memory: eight prompts
DISK_CAPACITY = "512MiB"
FILLERS = 9  # prompts that push all others out of memory
LEASE_S = 2
START_S = 900.0
SETTLE_S = 120.0
END_S = 30.0


class Served(msgspec.Struct, frozen=True):
    """Tokens of a prompt: computed by the prefill engine; by the decode engine from where."""

    prefilled: int = 0
    own: int = 0
    peer_memory: int = 0
    peer_disk: int = 0
    computed: int = 0


class Run(msgspec.Struct, frozen=True):
    """One prompt, handed over."""

    name: str
    way: str
    expected: Served
    served: Served
    fetched: int  # blocks that the decode node's store got from its peer
    answer: Answer
    alone: Answer

    @property
    def same(self) -> bool:
        """Tell whether the output is that of an engine alone."""
        return self.answer.tokens == self.alone.tokens


def expected(
    tokens: int, *, prefill_has: int = 0, decode_has: int = 0, on_disk: bool = False
) -> Served:
    """Say where a prompt's tokens have to come from; has: tokens of it that a node has.

    The decode engine gets them all: vLLM computes the last one again and does not count that.
    """
    kept, own = (has // BLOCK_TOKENS * BLOCK_TOKENS for has in (prefill_has, decode_has))
    peer = tokens - own
    memory, disk = (0, peer) if on_disk else (peer, 0)
    return Served(tokens - kept, own, memory, disk, 0)


class Node:
    """An engine with a private store."""

    def __init__(self, name: str, model: Path, folder: Path, **extra: Any) -> None:
        self.engine_id = f"{name}-{secrets.token_hex(4)}"
        disk = {"path": str(folder / f"{name}-kv"), "capacity": DISK_CAPACITY}
        connector = tiered(
            cpu=CAPACITY, nvme=disk, listen="127.0.0.1:0", lease=f"{LEASE_S}s", **extra
        )
        connector["engine_id"] = self.engine_id
        self.server = ApiServer(name, model, folder, connector=connector, block_size=BLOCK_TOKENS)

    def tokens(self) -> dict[str, float]:
        """Return vLLM's counts of prompt tokens, by their source."""
        found = self.server.metrics()
        cached = "prompt_tokens_cached_by_source{source=%s}"
        own = sum(found.get(cached % source, 0) for source in ("device", "host", "disk"))
        computed = found.get("prompt_tokens_by_source{source=local_compute}", 0)
        return {"own": own, "peer": found.get(cached % "p2p", 0), "computed": computed}

    def store(self) -> dict[str, float]:
        """Return the store's numbers by name{label}; namespaces are summed."""
        return numbers(f"{admin.PRIVATE}{self.engine_id}", SETTLE_S)

    def gone(self) -> bool:
        """Tell whether the store has ended, too."""
        try:
            self.store()
        except admin.StoreUnreachable:
            return True
        return False


class HandOver(Demo):
    """Three engines and a router."""

    def __init__(self, console: Console, folder: Path) -> None:
        super().__init__(console, folder)
        self.runs: list[Run] = []
        self.legs: dict[str, float] = {}

    def run(self) -> None:
        """Do everything."""
        self.say("making a random 4-layer model on disk")
        model = make_model("llama_s", self.folder)
        self.prefill = Node("prefill", model, self.folder)
        self.decode = {way: Node(f"decode-{way}", model, self.folder, transfer=way) for way in WAYS}
        nodes = [self.prefill, *self.decode.values()]
        with ExitStack() as ends:
            for node in nodes:
                ends.enter_context(node.server)
            self.say("starting a prefill and two decode engines, each with a store of its own")
            self._await_engines(nodes)
            for way, node in self.decode.items():
                router = Router(self.folder, self.prefill.server.url, node.server.url)
                port = ends.enter_context(router).port
                self._hand_over(way, node, port)
                for leg, count in router.legs().items():
                    self.legs[leg] = self.legs.get(leg, 0) + count
            for node in nodes:
                node.server.end()
        self.wait(lambda: all(node.gone() for node in nodes), "the stores to end", END_S)

    def _await_engines(self, nodes: list[Node]) -> None:
        """Wait until all serve, and let each do what only its first request costs."""
        began_s = time.monotonic()
        with self.console.status("starting") as status:

            def ready() -> bool:
                there = [node.server.ready() for node in nodes]
                waited_s = time.monotonic() - began_s
                status.update(
                    f"{sum(there)} of {len(nodes)} engines serve, {waited_s:.0f} s"
                    " (20 to 60 s, two cores)"
                )
                return all(there)

            self.wait(ready, "engines to start", START_S)
        for node in nodes:
            complete(node.server.port, {"prompt": [3, 4], "max_tokens": 2})

    # Prompts

    def _hand_over(self, way: str, node: Node, router: int) -> None:
        """Have four prompts handed over to one decode engine."""
        how = "pulls from" if way == "pull" else "is pushed to by"
        self.say(f"4 prompts; their decode engine {how} the prefill node")
        self._meet(way, node, router)
        cold = prompt(COLD_SEED, PROMPT_TOKENS)
        said = self._run("cold", way, node, cold, expected(len(cold)), router)
        turn = cold + said.tokens + prompt(TURN_SEED, TURN_TOKENS)
        kept = len(cold) + OUTPUT_TOKENS - 1  # of the last token there is no KV
        has = expected(len(turn), prefill_has=len(cold), decode_has=kept)
        self._run("next turn", way, node, turn, has, router)

        tokens = prompt(KNOWN_SEED, PROMPT_TOKENS)
        self._ask(node.server.port, tokens[:KNOWN_TOKENS], way)
        has = expected(len(tokens), decode_has=KNOWN_TOKENS)
        self._run("known start", way, node, tokens, has, router)

        tokens = prompt(STORED_SEED, PROMPT_TOKENS)
        has = expected(len(tokens), on_disk=True)
        self._run("from disk", way, node, tokens, has, None)

    def _meet(self, way: str, node: Node, router: int) -> None:
        """Let both stores' exporters start, which private ones do at their first hand-over."""
        before = node.tokens()["peer"]

        def met() -> bool:
            self._ask(router, prompt(secrets.randbits(32), 4 * BLOCK_TOKENS), way)
            return node.tokens()["peer"] > before

        self.wait(met, "a first hand-over", SETTLE_S)

    def _run(
        self,
        name: str,
        way: str,
        node: Node,
        tokens: list[int],
        has: Served,
        router: int | None,
    ) -> Answer:
        """Hand one prompt over; router: its port, None to do its work with a pause between."""
        with self.console.status(f"{way}: {name}"):
            before = self._counts(node)
            if router is None:
                answer = self._late(node, tokens, way)
            else:
                answer = self._ask(router, tokens, way)
            self._settle(node)
            after = self._counts(node)
            alone = self._ask(self.prefill.server.port, tokens, secrets.token_hex(8))
        grown = {what: int(after[what] - before[what]) for what in after}
        grown["prefilled"] -= FILLERS * PROMPT_TOKENS if router is None else 0
        memory, disk = grown["memory blocks"], grown["disk blocks"]
        on_disk = min(disk * BLOCK_TOKENS, grown["peer"])  # the last block may not be full
        served = Served(
            grown["prefilled"], grown["own"], grown["peer"] - on_disk, on_disk, grown["computed"]
        )
        self.runs.append(Run(name, way, has, served, memory + disk, answer, alone))
        return answer

    def _counts(self, node: Node) -> dict[str, float]:
        """Return all that a hand-over counts, at this moment."""
        store = node.store()
        fetched = {
            tier: store.get(f"kvstore_fetched_blocks{{{tier}}}", 0)
            for tier in ("cpu", "prefill", "nvme", "other")
        }
        return {
            **node.tokens(),
            "prefilled": self.prefill.tokens()["computed"],
            "disk blocks": fetched.pop("nvme"),
            "memory blocks": sum(fetched.values()),
        }

    def _settle(self, node: Node) -> None:
        """Let what is counted with an engine's next output, or a store's next turn, be counted."""
        seen, since_s = self._counts(node), time.monotonic()

        def quiet() -> bool:
            nonlocal seen, since_s
            now = self._counts(node)
            if now != seen:
                seen, since_s = now, time.monotonic()
            return time.monotonic() - since_s > 0.3

        self.wait(quiet, "counts to stand still", SETTLE_S)

    @staticmethod
    def _ask(port: int, tokens: list[int], salt: str) -> Answer:
        body = {"prompt": tokens, "max_tokens": OUTPUT_TOKENS, "cache_salt": salt}
        return complete(port, body)

    def _late(self, node: Node, tokens: list[int], salt: str) -> Answer:
        """Let the decode leg come when the prefill node has the blocks on disk only."""
        body = {"prompt": tokens, "max_tokens": OUTPUT_TOKENS, "cache_salt": salt}
        before = self._on_disk()
        handed = complete(self.prefill.server.port, prefill_leg(body))
        blocks = -(-len(tokens) // BLOCK_TOKENS)
        self.wait(lambda: self._on_disk() >= before + blocks, "blocks to be on disk", SETTLE_S)
        held = "kvstore_hand_over_bytes{held}"
        self.wait(lambda: not self.prefill.store().get(held), "a lease to end", SETTLE_S)
        for _ in range(FILLERS):
            filler = prompt(secrets.randbits(32), PROMPT_TOKENS)
            complete(self.prefill.server.port, {"prompt": filler, "max_tokens": 1})
        leg = decode_leg({**body, "stream": True}, handed.kv_transfer_params)
        return complete(node.server.port, leg)

    def _on_disk(self) -> float:
        return self.prefill.store().get("kvstore_tier_blocks{nvme,stored}", 0)

    # What it shows

    def problems(self) -> list[str]:
        """Compare what came from where, outputs, and what router and store counted."""
        found = []
        for one in self.runs:
            where = f"{one.way}, {one.name}"
            if one.served != one.expected:
                found.append(f"{where}: tokens came from {one.served}, expected {one.expected}")
            tokens = one.served.peer_memory + one.served.peer_disk
            if one.fetched != -(-tokens // BLOCK_TOKENS):
                found.append(f"{where}: {one.fetched} blocks were fetched, {tokens} tokens used")
            if not one.same:
                found.append(f"{where}: {one.answer.tokens} instead of {one.alone.tokens}")
        for leg, count in self.legs.items():
            if not leg.endswith(" ok"):
                found.append(f"the router counted {count:.0f} of {leg!r}, expected 0")
        return found

    def show(self) -> None:
        """Print the runs, and the router's counts."""
        self.console.print(
            "time to first token: of an engine alone, and of both behind the router;\n"
            "tokens: computed by the prefill engine; those of the decode engine came from its\n"
            "own node, its peer's memory, its peer's disk, or were computed there"
        )
        numbers = [
            *("alone\nTTFT", "routed\nTTFT"),
            *("prefill\nengine", "own\nnode", "peer's\nmemory", "peer's\ndisk", "decode\nengine"),
        ]
        shown = table(["prompt\n", "by\n"], numbers, "output\n")
        for one in self.runs:
            shown.add_row(
                one.name,
                one.way,
                f"{one.alone.ttft_s * 1000:.0f} ms",
                f"{one.answer.ttft_s * 1000:.0f} ms",
                *(f"{count:,}" for count in msgspec.structs.astuple(one.served)),
                "same" if one.same else "DIFFERS",
            )
        self.console.print(shown)
        done = ", ".join(f"{count:.0f} {leg}" for leg, count in sorted(self.legs.items()))
        self.console.print(f"the router's legs: {done}")


class Router:
    """A router process."""

    def __init__(self, folder: Path, prefill: str, decode: str) -> None:
        self.port = 0
        self._log_path = folder / "router.log"
        command = [sys.executable, "-m", "tests.demo.router", "--listen", "127.0.0.1:0"]
        self._command = [*command, "--prefill", prefill, "--decode", decode]
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log_path.open("wb") as log:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches our process, which then ends it
            )
        line = b"" if self._child.stdout is None else self._child.stdout.readline()
        if not line.startswith(b"router at "):
            self.__exit__()
            raise KVStoreError(f"the router did not start: {self._log_path.read_text()[-500:]}")
        self.port = int(line.rpartition(b":")[2])
        return self

    def legs(self) -> dict[str, float]:
        """Return its count of legs, by leg and outcome."""
        return {
            f"{labels['leg']} {labels['outcome']}": value
            for name, labels, value in scraped(self.port)
            if name == "router_legs_total"
        }

    def __exit__(self, *_error: object) -> None:
        if self._child is not None:
            self._child.terminate()
            if self._child.stdout is not None:
                self._child.stdout.close()
            self._child.wait()
