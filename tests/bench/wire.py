"""What an engine's owner and the process that holds it say to each other, one JSON per line."""

from __future__ import annotations

from typing import Any

import msgspec


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt.

    Steps count from the start of the run. A request arrives before the step of its number and is
    aborted before the step of that number: equal numbers abort it before it was ever scheduled.
    """

    id: str
    tokens: list[int]
    arrive_step: int = 0
    abort_step: int | None = None
    max_tokens: int | None = None  # instead of the run's
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    adapter: str | None = None  # folder of a LoRA adapter


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request."""

    id: str
    tokens: list[int]
    margins: list[float]  # per token: logprob of the best minus that of the second
    cached_tokens: int  # of the prompt, as vLLM reports them: local and external together
    ttft_s: float | None  # from being added; None if there was no token
    steps_to_first_token: int | None  # 1: the step after it was added; in-process only
    finish_reason: str  # length, abort or error
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """Ran to its last token."""
        return self.finish_reason == "length"

    @property
    def aborted(self) -> bool:
        """Ended by its abort_step."""
        return self.finish_reason == "abort"


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First line: which engine to make."""

    model: str
    connector: dict[str, Any] | None
    in_process: bool
    tensor_parallel_size: int
    kv_cache_bytes: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    extra: dict[str, Any]


class Run(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run requests together; logprobs per token, 0 for none."""

    requests: list[Request]
    max_tokens: int
    logprobs: int


class IdleSteps(msgspec.Struct, frozen=True, tag=True):
    """Step so many times without adding anything."""

    steps: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Forget the engine's prefix cache; connector_too: and the connector's."""

    connector_too: bool


class GetMetrics(msgspec.Struct, frozen=True, tag=True):
    """Read the metrics."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """Shut the engine down and end."""


Command = Start | Run | IdleSteps | ResetPrefixCache | GetMetrics | Close


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine serves; pids: driver, and where they are processes, core, worker0, worker1..."""

    pids: dict[str, int]


class Ran(msgspec.Struct, frozen=True, tag=True):
    """Results in the order of the requests."""

    results: list[Result]


class Idled(msgspec.Struct, frozen=True, tag=True):
    """How many of the steps had something to do."""

    steps_with_work: int


class WasReset(msgspec.Struct, frozen=True, tag=True):
    """False if some block was still in use."""

    ok: bool


class Metrics(msgspec.Struct, frozen=True, tag=True):
    """vLLM metrics, flattened."""

    values: dict[str, float]


class Closed(msgspec.Struct, frozen=True, tag=True):
    """The engine is down."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The command raised; the driver ends after saying so."""

    error: str


Reply = Ready | Ran | Idled | WasReset | Metrics | Closed | Failed
