"""Tiers and policies of others, which the configuration names by their dotted names.

What raises in a tier of others, or is wrong, costs it alone.
A tier that is off stays off until the store is started again. Nothing is found in it, nothing is
written to it, and it gets no more memory. What was under way fails once the tier has ended, so that
it writes into no slot that is somebody else's by then. One that does not end keeps these slots.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import msgspec

from kvstore import clock
from kvstore.barrier import Ended
from kvstore.config import TierConfig
from kvstore.core import limits
from kvstore.core.errors import ConfigError, NotYet, TierError
from kvstore.core.eviction import LRU
from kvstore.core.policy import MakePolicy, Policy
from kvstore.core.segmented import SEGMENTED
from kvstore.core.tier import SlotMemory, Telling, Tier, TierContext
from kvstore.core.types import BlockKey, Changes, JobId, JobResult, LookupResult, Slot, TransferJob

log = logging.getLogger(__name__)

TRIAL_NAMESPACE = "0" * 32
TRIAL_BYTES = 4096
_CLOSE_S = 5.0  # for a tier that was switched off and still closes as the store ends
CLOSE_LIMIT_S = 60.0  # for one whose model an engine brings again
# A hash and its group; engines can be told of no longer ones.
_Keys = list[Annotated[BlockKey, msgspec.Meta(min_length=3, max_length=limits.KEY_BYTES_MAX)]]


class _Told(msgspec.Struct):
    """What Changes of a tier have to be."""

    added: _Keys
    removed: _Keys


def find_class(dotted: str, kind: str, protocol: type) -> Any:  # noqa: ANN401 - of any class
    """Import "package.module:Class", of a kind with a protocol's methods. Raises ConfigError."""
    module, _, name = dotted.partition(":")
    try:
        found = getattr(import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # a plug-in's code may raise anything
        raise ConfigError(f"{kind}: {dotted!r} cannot be loaded: {exc}") from exc
    if not isinstance(found, type):
        raise ConfigError(f"{kind}: expected a class, found {dotted}, a {type(found).__name__}")
    verbs = sorted(verb for verb in vars(protocol) if not verb.startswith("_"))
    if missing := [verb for verb in verbs if not callable(getattr(found, verb, None))]:
        raise ConfigError(f"{kind}: {dotted} has no {', '.join(missing)}")
    return found


class Plugin:
    """A `[[tier]]` of the configuration: its class, and whether it is still used."""

    def __init__(self, config: TierConfig) -> None:
        self.name = config.name
        self.off = False
        self._config = config
        self._ends: dict[str, _End] = {}  # of tiers that close, by namespace

    def make(self, namespace: str, slot_bytes: int, memory: SlotMemory) -> Tier:
        """Make a namespace's tier. Raises what the class raises, and ConfigError for no class."""
        found = find_class(self._config.class_name, f"tier {self.name}", Tier)
        context = TierContext(self.name, namespace, slot_bytes, memory, self._config.options)
        made: Tier = found(context)
        return made

    def guarded(self, namespace: str, slot_bytes: int, memory: SlotMemory) -> _Guarded:
        """Make a namespace's tier behind the barrier; one that cannot be made is off."""
        lent, made, telling = _Lent(self, memory), None, None
        with self.barrier("the constructor"):
            made = None if self.off else self.make(namespace, slot_bytes, lent)
            telling = made if isinstance(made, Telling) else None  # which looks at its attributes
        return _Guarded(self, namespace, made, telling, lent)

    # Ends: they may take long, so each has a thread

    def end(self, namespace: str, close: Callable[[], None]) -> threading.Thread:
        """Close the tier of a namespace on a thread."""
        self._ends = {name: end for name, end in self._ends.items() if end.thread.is_alive()}
        name = f"kvstore-end-{self.name}"
        thread = threading.Thread(target=close, name=name, daemon=True)
        self._ends[namespace] = _End(thread, clock.now_s())
        thread.start()
        return thread

    def await_end(self, namespace: str) -> None:
        """Raise NotYet while the tier that a namespace had before is being closed.

        One that is not closed after CLOSE_LIMIT_S is off, and not waited for.
        """
        end = self._ends.get(namespace)
        if end is None or self.off or not end.thread.is_alive():
            return
        took_s = clock.now_s() - end.began_s
        if took_s < CLOSE_LIMIT_S:
            raise NotYet(f"tier {self.name} still closes what it had of this model")
        self._failed("close", TimeoutError(f"it has not ended for {took_s:.0f} s"))

    def close(self) -> None:
        """Wait for the ends of its tiers; a moment if it is off."""
        until_s = clock.now_s() + _CLOSE_S
        for end in self._ends.values():
            while end.thread.is_alive() and not (self.off and clock.now_s() > until_s):
                end.thread.join(0.1)

    def barrier(self, verb: str) -> Ended:
        """Switch the tier off for whatever its code raises inside, but not for an interrupt."""
        return Ended(partial(self._failed, verb))

    def _failed(self, verb: str, exc: BaseException) -> bool:
        if isinstance(exc, KeyboardInterrupt):
            return False
        if not self.off:
            self.off = True
            log.error("tier %s is off: %s failed", self.name, verb, exc_info=exc)
        return True


def _refuse(make: Callable[[], object], told: str) -> None:
    """Raise ConfigError, which begins as told, for whatever a plug-in's constructor raises."""
    try:
        make()
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as exc:
        said = " ".join(f"{type(exc).__name__}: {exc}".split())
        raise ConfigError(f"{told} {said}") from exc


def refuse_tier(config: TierConfig) -> None:
    """Make a `[[tier]]` for a model that is none, and close it. Raises ConfigError."""
    names = ", ".join(sorted(config.options)) or "none"
    expected = f"tier {config.name}: expected options that {config.class_name} takes"
    plugin, memory = Plugin(config), _TrialMemory()
    _refuse(
        lambda: plugin.make(TRIAL_NAMESPACE, TRIAL_BYTES, memory).close(),
        f"{expected}, found {names}:",
    )


def find_policy(name: str) -> str | MakePolicy:
    """Return a policy of ours by its name, or the class of others. Raises ConfigError."""
    if name in (LRU, SEGMENTED):
        return name
    found: MakePolicy = find_class(name, "policy", Policy)
    return found


def refuse_policy(name: str) -> None:
    """Make a policy once. Raises ConfigError for one that cannot be made."""
    found = find_policy(name)
    if not isinstance(found, str):
        expected = "expected a class that is made with a function that returns how many blocks fit"
        _refuse(partial(found, lambda: 1), f"policy {name}: {expected}, found")


class _End(NamedTuple):
    thread: threading.Thread
    began_s: float


class _TrialMemory:
    """Memory of a model without blocks."""

    def view(self, _slot: Slot) -> memoryview:
        return memoryview(bytearray(TRIAL_BYTES))


class _Lent:
    """A namespace's memory, as a tier of others sees it: not any more once the tier is off.

    Its threads ask for views, too.
    """

    def __init__(self, plugin: Plugin, memory: SlotMemory) -> None:
        self._plugin, self._memory = plugin, memory
        self._lock = threading.Lock()
        self._views: dict[Slot, list[weakref.ref[object]]] = {}

    def view(self, slot: Slot) -> memoryview:
        """Return a slot's bytes. Raises TierError for a tier that is off."""
        with self._lock:
            if self._plugin.off:
                raise TierError(f"tier {self._plugin.name} is off")
            found = self._memory.view(slot)
            lent = (ctypes.c_char * len(found)).from_buffer(found)  # lives while any view of it
            alive = [view for view in self._views.get(slot, ()) if view() is not None]
            self._views[slot] = [*alive, weakref.ref(lent)]
            return memoryview(lent).cast("B")

    def forget(self, slots: Collection[Slot]) -> None:
        """Note that a job is over."""
        with self._lock:
            for slot in slots:
                self._views.pop(slot, None)

    def in_use(self, slots: Collection[Slot]) -> bool:
        """Tell whether the tier can still read or write some of these slots."""
        with self._lock:
            return any(view() is not None for s in slots for view in self._views.get(s, ()))


class _Guarded:
    """One namespace's tier of others, as a Tier that never raises but for a job it does not take.

    It says what the protocol wants: a result for each job, once. When it goes off, all that it told
    of has left.
    """

    def __init__(
        self,
        plugin: Plugin,
        namespace: str,
        tier: Tier | None,
        telling: Telling | None,
        memory: _Lent,
    ) -> None:
        """telling: the tier, if it says what enters and leaves it."""
        self.name = plugin.name
        self._plugin, self._namespace, self._memory = plugin, namespace, memory
        self._tier, self._telling = tier, telling
        self._open: dict[JobId, TransferJob] = {}
        self._told: set[BlockKey] = set()
        self._end: threading.Thread | None = None
        self._ended = tier is None  # or closed: it uses no memory any more

    @property
    def _used(self) -> Tier | None:
        return None if self._plugin.off else self._tier

    def _call(self, verb: str, *given: object) -> None:
        if (tier := self._used) is not None:
            with self._plugin.barrier(verb):
                getattr(tier, verb)(*given)

    def touch(self, key: BlockKey) -> None:
        self._call("touch", key)

    def discard(self, keys: Collection[BlockKey]) -> None:
        self._call("discard", keys)

    def clear(self) -> None:
        self._call("clear")

    def drain(self) -> None:
        self._call("drain")

    def tell(self) -> None:
        if self._telling is not None:
            self._call("tell")

    def close(self) -> None:
        """Begin to close it; Plugin.close waits for that."""
        if self._tier is not None and self._end is None:
            self._end = self._plugin.end(self._namespace, partial(self._finish, self._tier))

    def lookup(self, key: BlockKey) -> LookupResult:
        """Miss, if it is off."""
        if (tier := self._used) is not None:
            with self._plugin.barrier("lookup"):
                found = tier.lookup(key)
                if isinstance(found, LookupResult):
                    return found
                raise TierError(f"expected a LookupResult, found {type(found).__name__}")
        return LookupResult.MISS

    def take_changes(self) -> Changes:
        if self._telling is not None and not self._plugin.off:
            with self._plugin.barrier("take_changes"):
                told = msgspec.convert(
                    self._telling.take_changes(),
                    _Told,
                    from_attributes=True,
                    builtin_types=(bytes,),  # no text is taken for bytes
                )
                self._told.update(told.added)
                self._told.difference_update(told.removed)
                return Changes(told.added, told.removed)
        left, self._told = list(self._told), set()
        return Changes(removed=left)

    def submit(self, job: TransferJob) -> None:
        """Raises TierError for a tier that is off, or does not take the job."""
        tier = self._used
        if tier is None:
            raise TierError(f"tier {self.name} is off")
        self._open[job.job_id] = job
        refusal: TierError | None = None
        with self._plugin.barrier("submit"):
            try:
                tier.submit(job)
            except TierError as exc:  # its way to say no
                refusal = exc
        if refusal is not None:
            del self._open[job.job_id]
            raise refusal

    def poll(self) -> Sequence[JobResult]:
        """Return what has ended: each job once."""
        results: list[JobResult] = []
        if (tier := self._used) is not None:
            with self._plugin.barrier("poll"):
                for result in tier.poll():
                    job = self._checked(result)
                    self._memory.forget(job.slots)
                    results.append(result)
        if self._plugin.off:
            results += self._failed()
        return results

    def _checked(self, result: JobResult) -> TransferJob:
        """Take a job's result. Raises TierError for what is none."""
        if not isinstance(result, JobResult):
            raise TierError(f"expected a JobResult, found {type(result).__name__}")
        job = self._open.get(result.job_id)
        if job is None:
            raise TierError(f"job {result.job_id} was reported twice, or never submitted")
        if not isinstance(result.done, int) or not 0 <= result.done <= len(job.keys):
            raise TierError(f"expected up to {len(job.keys)} blocks done, found {result.done!r}")
        return self._open.pop(result.job_id)

    def _failed(self) -> list[JobResult]:
        """Return the jobs of a tier that is off which it cannot go on with any more."""
        self.close()
        if self._end is not None and self._end.is_alive():
            return []
        over = [
            job for job in self._open.values() if self._ended or not self._memory.in_use(job.slots)
        ]
        for job in over:
            del self._open[job.job_id]
            self._memory.forget(job.slots)
        return [JobResult(job.job_id, 0, TierError(f"tier {self.name} is off")) for job in over]

    def _finish(self, tier: Tier) -> None:
        """Close a tier that is not used any more, on a thread."""
        with self._plugin.barrier("drain"):
            tier.drain()
        with self._plugin.barrier("close"):
            tier.close()
            self._ended = True
