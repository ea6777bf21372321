"""Policies of others: their contract, and what one costs that breaks it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from inspect import signature
from pathlib import Path

import pytest
from hypothesis.stateful import invariant

from kvstore import cli
from kvstore.core.errors import ConfigError
from kvstore.core.index import Node
from kvstore.core.leases import NEVER_NS, Generations
from kvstore.core.manager import Manager
from kvstore.core.policy import MakePolicy, PluginOrder
from kvstore.core.types import BlockKey, Chain, GroupRule, Slot
from kvstore.replay_policies import Arc, S3Fifo
from kvstore.store.plugins import refuse_policy
from kvstore.testing import PolicyContract
from kvstore.testing.policy_contract import Memory
from tests.harness.fakes import Town, blocks, hashes, settings
from tests.harness.live import LiveStore, engine, eventually, store_settings
from tests.harness.pages import write_modules
from tests.test_manager_machine import ManagerMachine


class NewestFirst:
    """The newest block goes first."""

    def __init__(self, _blocks: Callable[[], int]) -> None:
        self.blocks: dict[Node, None] = {}

    def enter(self, block: Node, _now_s: float) -> None:
        self.blocks[block] = None

    def leave(self, block: Node) -> None:
        del self.blocks[block]

    def used(self, block: Node, _now_s: float) -> None:
        """It does not matter here."""

    def choose(self) -> Node:
        return list(self.blocks)[-1]

    def clear(self) -> None:
        self.blocks.clear()


class TestNewestFirst(PolicyContract):
    @pytest.fixture
    def policy(self) -> MakePolicy:
        return NewestFirst


class TestArc(PolicyContract):
    """One of those that replay compares with."""

    @pytest.fixture
    def policy(self) -> MakePolicy:
        return Arc


class TestS3Fifo(PolicyContract):
    """Another one."""

    @pytest.fixture
    def policy(self) -> MakePolicy:
        return S3Fifo


class TestSecondChance(PolicyContract):
    """The policy of docs/how-to/write-a-policy.md."""

    @pytest.fixture
    def policy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePolicy:
        write_modules(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        from second_chance import SecondChance  # type: ignore[import-not-found]

        made: MakePolicy = SecondChance
        return made


class Forgets(NewestFirst):
    def choose(self) -> Node:
        return list(self.blocks)[-1] if len(self.blocks) % 5 else Node(BlockKey(b""), None, Slot(0))


class KeepsOfBefore(NewestFirst):
    def clear(self) -> None:
        """Do nothing."""

    def choose(self) -> Node:
        return next(iter(self.blocks))


class Repeats(NewestFirst):
    last: Node | None = None

    def leave(self, block: Node) -> None:
        super().leave(block)
        self.last = block

    def choose(self) -> Node:
        return super().choose() if self.last is None else self.last


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("made up")


class ChoosesUnprintable(NewestFirst):
    def choose(self) -> Node:
        return Unprintable()  # type: ignore[return-value]


class ChoosesNone(NewestFirst):
    def choose(self) -> Node:
        return None  # type: ignore[return-value]


class TakesBlocksByName(NewestFirst):
    """It does not see that a block which has come again is another one."""

    def __init__(self, blocks: Callable[[], int]) -> None:
        super().__init__(blocks)
        self.named: dict[BlockKey, Node] = {}

    def enter(self, block: Node, now_s: float) -> None:
        super().enter(block, now_s)
        self.named.setdefault(block.key, block)

    def choose(self) -> Node:
        return self.named[super().choose().key]


BROKEN: dict[type[NewestFirst], str] = {
    Forgets: "test_every_block_that_can_go_goes_when_room_is_needed",
    KeepsOfBefore: "test_after_a_clear_it_starts_anew",
    Repeats: "test_it_names_what_it_was_given",
    ChoosesNone: "test_a_path_goes_from_its_end",
    TakesBlocksByName: "test_any_order_of_calls",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_Q66_the_contract_fails_a_policy_that_breaks_it(kind: MakePolicy) -> None:
    failed, contract = [], PolicyContract()
    for name in (name for name in dir(PolicyContract) if name.startswith("test_")):
        check = getattr(contract, name)
        given = {"policy": kind, "seed": 1}
        try:
            check(**{needed: given[needed] for needed in signature(check).parameters})
        except (AssertionError, KeyError):
            failed.append(name)
    assert BROKEN[kind] in failed  # type: ignore[index]


def test_Q66_a_block_that_others_are_read_below_has_left() -> None:
    """It was told of as an end until it was chosen, and taken for gone then."""
    made: list[NewestFirst] = []

    def make(blocks: Callable[[], int]) -> NewestFirst:
        made.append(NewestFirst(blocks))
        return made[-1]

    memory = Memory(make, 8)
    manager, chain = memory.manager, memory.chain(1, 2, 3, 4)
    memory.fill(memory.chain(1, 2))
    keys = chain.keys_at(0, range(2, 4))
    slots = manager.prepare_store(2)
    assert manager.begin_promotions(keys, [chain.key(0, 1), keys[0]], slots) == [0, 1]
    assert [block.key for block in made[0].blocks] == []
    manager.complete_promotions(slots, 2)
    assert [block.key for block in made[0].blocks] == [keys[1]]


@pytest.mark.parametrize("cleared", [False, True])
def test_Q66_a_block_that_others_hang_below_again_has_left(cleared: bool) -> None:
    """What hung below a block that was dropped hangs below its next copy, once both are loaded."""
    made: list[NewestFirst] = []

    def make(blocks: Callable[[], int]) -> NewestFirst:
        made.append(NewestFirst(blocks))
        return made[-1]

    memory = Memory(make, 8)
    manager, chain = memory.manager, memory.chain(1, 2)
    if cleared:
        memory.fill(memory.chain(3))
        manager.clear()
    memory.fill(chain)
    manager.drop(chain.key(0, 0), "discard")
    memory.fill(memory.chain(1))
    lease = manager.prepare_load(chain, 2, 1, NEVER_NS)
    assert lease is not None
    assert [block.key for block in made[0].blocks] == []
    manager.complete_load(lease.lease_id)
    assert [block.key for block in made[0].blocks] == [chain.key(0, 1)]


class PluginMachine(ManagerMachine):
    """Every order of calls of a manager, with a policy of others."""

    policy = NewestFirst  # type: ignore[assignment]

    @invariant()
    def what_has_entered_has_no_children(self) -> None:
        order = self.manager._policy
        if isinstance(order, PluginOrder):
            assert not any(block.children for block in order._entered)

    def teardown(self) -> None:
        order = self.manager._policy
        if isinstance(order, PluginOrder):
            assert order._policy is not None


PluginMachine.TestCase.settings = ManagerMachine.TestCase.settings
TestPluginMachine = pytest.mark.slow(PluginMachine.TestCase)


# A policy that fails


class Failing:
    """Raises in one call, the tenth time; made anew for each verb."""

    verb = ""

    def __init__(self, blocks: Callable[[], int]) -> None:
        self._rest, self._left = NewestFirst(blocks), 10
        if self.verb == "constructor":
            raise SystemExit("no")

    def __getattr__(self, verb: str) -> Callable[..., object]:
        def call(*given: object) -> object:
            self._left -= verb == self.verb
            if not self._left:
                raise RuntimeError("made up")
            return getattr(self._rest, verb)(*given)

        return call


VERBS = ["constructor", "enter", "leave", "used", "choose"]


@pytest.mark.parametrize("verb", VERBS)
def test_Q66_memory_goes_on_by_least_recent_use_without_a_policy_that_raises(verb: str) -> None:
    kind = type("Kind", (Failing,), {"verb": verb})
    failures: list[str] = []
    generations = Generations()
    generations.add(memoryview(bytearray(4 * 20)).cast("I"))
    manager = Manager(
        (GroupRule(),), generations, policy=kind, failed=lambda call, _why: failures.append(call)
    )
    manager.slots.add([Slot(slot) for slot in range(20)])
    for number in range(40):
        chain = Chain(number.to_bytes(8, "big"), 8, 1)
        (slot,) = manager.prepare_store(1)
        manager.begin_store(chain.key(0, 0), None, slot)
        manager.complete_store(slot, ok=True)
        lease = manager.prepare_load(chain, 1, 1, 1 << 60)
        assert lease is not None
        manager.complete_load(lease.lease_id)
    assert [call.removeprefix("the ") for call in failures] == [verb]
    assert len(manager.index) == 20
    assert len(manager.prepare_store(20)) == 20, "a block was lost with the policy"


def test_Q66_a_wrong_choice_switches_it_off_and_costs_no_block() -> None:
    for kind in (Forgets, ChoosesNone, ChoosesUnprintable, Repeats):
        failures: list[BaseException] = []
        memory = Memory(kind, 30)
        memory.manager._policy._failed = lambda _, why, to=failures: to.append(why)  # type: ignore[union-attr]
        for number in range(30):
            memory.fill(memory.chain(number))
        assert len(memory.manager.prepare_store(30)) == 30
        assert ["expected a block that has entered" in str(why) for why in failures] == [True]


def test_Q66_a_store_says_once_that_a_policy_is_off_and_counts_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    town = Town(settings(policy=f"{__name__}:RaisesAtOnce"))
    live = town.attach(credit_slots=2)
    with caplog.at_level(logging.ERROR):
        for number in range(80):
            live.put(hashes(1, f"block {number}"))
    said = [record.message for record in caplog.records if "policy" in record.message]
    assert said == [f"policy {__name__}:RaisesAtOnce is off: enter failed; lru from now on"]
    assert town.store.numbers.counts["kvstore_policy_bugs",] == 1


class RaisesAtOnce(NewestFirst):
    def enter(self, _block: Node, _now_s: float) -> None:
        raise RuntimeError("made up")


# As an operator names it


def test_Q66_a_policy_named_in_the_settings_says_what_goes(tmp_path: Path) -> None:
    cpu = {"capacity": "16MiB", "policy": f"{__name__}.NewestFirst"}
    with LiveStore(store_settings(tmp_path, cpu=cpu)) as store, engine(store) as live:
        manager = next(iter(store.server.store.namespaces.values())).manager
        assert isinstance(manager._policy, PluginOrder)
        first = hashes(1, "first")
        for name in ("first", *map(str, range(30))):
            live.put(hashes(1, name))
        eventually(lambda: not store.server.store.busy)
        assert blocks(live.ask(first)) == [0], "the newest ones went"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nowhere:Policy", "'nowhere:Policy' cannot be loaded: No module named 'nowhere'"),
        (f"{__name__}:VERBS", f"policy: expected a class, found {__name__}:VERBS, a list"),
        (f"{__name__}:Path", f"policy: {__name__}:Path has no choose, clear, enter"),
        (f"{__name__}:Failing", f"policy: {__name__}:Failing has no "),
        (f"{__name__}:Picky", "which returns how many blocks fit, found ValueError: picky"),
    ],
)
def test_Q66_a_wrong_policy_is_refused_before_the_start(name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_policy(name)
    assert expected.replace("which returns", "that returns") in str(refused.value)


class Picky(NewestFirst):
    def __init__(self, _blocks: Callable[[], int]) -> None:
        raise ValueError("picky")


def test_Q66_replay_runs_it_and_names_its_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(f'{{"hash_ids": [{n % 7}]}}' for n in range(50)))
    found = []
    for policy in ("lru", f"{__name__}:NewestFirst"):
        assert cli.main(["replay", str(file), "--cpu", "5", "--policy", policy, "--json"]) == 0
        found.append(capsys.readouterr().out)
    assert '"block_hit_ratio":0.0,' in found[0]
    assert '"block_hit_ratio":0.' in found[1]
    assert '"block_hit_ratio":0.0,' not in found[1], "a loop is what LRU is worst at"
    for policy, said in itertools.chain(
        [("fifo", '--policy: expected "segmented", "lru", or a dotted name')],
        [(f"{__name__}:RaisesAtOnce", "the policy failed in enter: RuntimeError: made up")],
    ):
        assert cli.main(["replay", str(file), "--cpu", "5", "--policy", policy]) == 2
        assert said in capsys.readouterr().err
