"""The bucket of a store: requests on threads, each with a deadline, and what they cost.

All namespaces share it. Its loop's thread submits requests and takes their ends with poll(), once
`ended` has woken it.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from kvstore.config import ObjectConfig
from kvstore.core.errors import BlockCorrupt, ConfigError
from kvstore.core.write_budget import WriteBudget
from kvstore.units import one_line
from tiers.object.health import CORRUPT, GET, HEAD, MISSING, OK, PUT, REFUSED, Health
from tiers.runner import Runner
from tiers.wakeup import Wakeup

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

LOOK_S = 1.0  # for a question whether an object is there
LOOK_THREADS = 8
LOOKS_MIN = 2 * LOOK_THREADS  # questions that may be open in any case
LOOKS_WAIT_S = 0.5  # no further one may, where it would wait longer than this for a thread
_SECOND_NS = 1_000_000_000
TRIAL = "v1/trial"  # an object that is asked for only to see whether the bucket answers
_REFUSALS = (PermissionDeniedError, UnauthenticatedError)
_ARCHIVED = "InvalidObjectState"  # it is there, and cannot be read
UNSENT, TIMEOUT, ERROR = "unsent", "timeout", "error"
_WHY_MAX = 300
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_CAUSE = re.compile(
    r'(?:message|error): "([^"]{1,99})"|InvalidCertificate\(\s*(\w{1,64})|kind: (Timeout),'
)
_TO_LIST = (
    "without the right to list (s3:ListBucket) what is missing is refused, too: see kvstore check"
)


class Request(msgspec.Struct, eq=False):
    """One request, and how it ended.

    ended(request): called by poll(). size: bytes that the object has to have; 0: any number.
    make(): returns what is put, in parts; take(data): takes what was read, and may raise
    BlockCorrupt. Both are called on a thread. anew: put it though an object of this name may be
    there. changes: once a put was sent, not only asked whether it is needed. wanted(): whether to
    send it still, asked on the thread. took_s: from when it was sent, if it was.
    """

    verb: str
    name: str
    ended: Callable[[Request], None]
    size: int = 0
    make: Callable[[], Iterable[bytes]] | None = None
    take: Callable[[memoryview], None] | None = None
    anew: bool = False
    changes: bool = False
    wanted: Callable[[], bool] | None = None
    outcome: str = ""
    why: str = ""
    took_s: float = 0.0


def client_of(config: ObjectConfig, timeout_s: float) -> obstore.store.ObjectStore:
    """Make a client whose requests end in time; credentials are those of the environment.

    Nothing is sent. Raises ConfigError.
    """
    options: ClientConfig = {
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=timeout_s),
        "allow_http": config.endpoint.startswith("http:"),
    }
    once: RetryConfig = {"max_retries": 0}
    of_s3: S3Config = {"endpoint": config.endpoint} if config.endpoint else {}
    try:
        return from_url(config.url, config=of_s3, client_options=options, retry_config=once)
    except (BaseError, ValueError, TypeError) as exc:
        raise ConfigError(f"[object] url: {reason_of(exc)}") from exc


def reason_of(exc: Exception, *, asked: bool = True) -> str:
    """Return the first line of an error, with the code in its body and the cause below it.

    asked: the request changes nothing, so a refusal may mean that nothing is there.
    """
    code, cause = _CODE.search(str(exc)), _CAUSE.search(str(exc))
    text = one_line(str(exc).partition("\n")[0], _WHY_MAX)
    text = f"{code[1]}: {text}" if code else text
    if cause:
        text += f": {one_line(cause[cause.lastindex or 0], _WHY_MAX)}"
    unclear = code is None or code[1] == "AccessDenied"
    return f"{text} ({_TO_LIST})" if asked and unclear and isinstance(exc, _REFUSALS) else text


class Bucket:
    """Requests to one bucket; none is made while it is off."""

    def __init__(self, config: ObjectConfig, secret: bytes | None) -> None:
        """secret: 32 bytes, to encrypt objects with. Raises ConfigError."""
        self.secret, self.run_bytes = secret, config.run_bytes
        self.ends = False  # nothing more is put
        self.cleared = False  # tiers that are made use only what they have put
        self.timeout_s = config.timeout_ns / 1e9
        self.health = Health(config.url)
        self.budget = WriteBudget(config.write_budget_bytes)
        self.ended = Wakeup()  # requests have
        self.counts: Counter[str] = Counter()  # of requests, by verb and outcome; may be emptied
        self._requests = WriteBudget(config.requests, _SECOND_NS)  # of so many a "day"
        self._requests.left_bytes = config.requests
        self._look_s = 0.0  # how long questions take, as a mean of the last ones
        self._moves = client_of(config, self.timeout_s)
        self._looks = client_of(config, min(LOOK_S, self.timeout_s))
        self._closed = False
        self.put_threads = max(1, config.threads // 2)
        lanes = {HEAD: LOOK_THREADS, GET: config.threads, PUT: self.put_threads}
        self._lanes = {
            verb: Runner(f"kvstore-{verb}", self._run, _failed, threads, self.ended.wake)
            for verb, threads in lanes.items()
        }

    # On the loop's thread

    def fileno(self) -> int:
        """Return the descriptor of `ended`, for a selector."""
        return self.ended.fileno()

    def submit(self, request: Request) -> None:
        """Start a request, behind those of its kind."""
        self._lanes[request.verb].submit(request)

    def may_look(self, now_ns: int) -> bool:
        """Tell whether to ask for an object, and count it."""
        if self.health.off or self._crowded or not self._requests.left(now_ns):
            self.counts[f"{HEAD}_{UNSENT}"] += 1
            return False
        self._requests.spend(1)
        return True

    @property
    def _crowded(self) -> bool:
        """Tell whether questions come faster than the bucket answers."""
        count = self._lanes[HEAD].open
        return count >= LOOKS_MIN and count * self._look_s > LOOK_THREADS * LOOKS_WAIT_S

    def may_put(self, now_ns: int, *, anew: bool) -> bool:
        """Tell whether to put an object, and count that, and unless anew the question before it."""
        writes, now_s = self.health.writes, now_ns / 1e9
        blocked = self.ends or self.health.off or not writes.due(now_s)
        if blocked or not self.budget.left(now_ns) or not self._requests.left(now_ns):
            return False
        self._requests.spend(2 - anew)
        return writes.may_try(now_s)

    def poll(self, now_ns: int) -> None:
        """Take the ends of requests; ask now and then whether a bucket that is off answers."""
        now_s = now_ns / 1e9
        for lane in self._lanes.values():
            for request in lane.poll():
                self.counts[f"{request.verb}_{request.outcome}"] += 1
                if request.verb == HEAD and request.outcome != UNSENT:
                    self._look_s += (request.took_s - self._look_s) / (8 if self._look_s else 1)
                self.health.ended(request.verb, request.outcome, request.why, now_s)
                request.ended(request)
        if self.health.off and self.health.reads.may_try(now_s):
            self.submit(Request(HEAD, TRIAL, lambda _: None))

    def close(self) -> None:
        """Send nothing more, and wait for what was sent."""
        self._closed = True
        for lane in self._lanes.values():
            lane.close()
        self.ended.close()

    # On threads

    def _run(self, request: Request) -> Request:
        unwanted = request.wanted is not None and not request.wanted()
        if unwanted or self._closed or (self.health.off and request.name != TRIAL):
            request.outcome, request.why = UNSENT, "the bucket is not used now"
            return request
        began_s = time.monotonic()
        try:
            self._make(request)
        except FileNotFoundError as exc:
            request.outcome, request.why = MISSING, reason_of(exc)
        except _REFUSALS as exc:
            request.outcome = CORRUPT if _ARCHIVED in str(exc) else REFUSED
            request.why = reason_of(exc, asked=not request.changes)
        except BlockCorrupt as exc:
            request.outcome, request.why = CORRUPT, str(exc)
        except (BaseError, OSError) as exc:
            limit_s = min(LOOK_S, self.timeout_s) if request.verb == HEAD else self.timeout_s
            late = time.monotonic() - began_s >= limit_s
            request.outcome, request.why = TIMEOUT if late else ERROR, reason_of(exc)
        else:
            request.outcome = OK
        request.took_s = time.monotonic() - began_s
        return request

    def _make(self, request: Request) -> None:
        name = request.name
        if request.verb == HEAD:
            _check(request, obstore.head(self._looks, name)["size"])
        elif request.verb == GET and request.take is not None:
            found = obstore.get(self._moves, name)
            _check(request, found.meta["size"])  # before memory is taken for it
            request.take(memoryview(found.bytes()))
        elif request.make is not None and (request.anew or not self._there(request)):
            data, request.changes = request.make(), True
            obstore.put(self._moves, name, iter(data), use_multipart=False)

    def _there(self, request: Request) -> bool:
        """Tell whether another store has put it."""
        try:
            _check(request, obstore.head(self._moves, request.name)["size"])
        except (FileNotFoundError, BlockCorrupt):
            return False
        return True


def _check(request: Request, size: int) -> None:
    """Raise BlockCorrupt for a size that the object cannot have, if it is known."""
    if request.size and size != request.size:
        raise BlockCorrupt(f"{request.name}: {size} bytes, expected {request.size}")


def _failed(request: Request, exc: Exception) -> Request:
    request.outcome, request.why = ERROR, repr(exc)
    return request
