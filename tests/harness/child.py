"""An object in a process of its own, whose methods are called over a pipe."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Self

from kvstore.core.errors import KVStoreError


class Child:
    """That process; it is gone after the context."""

    def __init__(
        self, make: Callable[..., object], *arguments: object, environment: Mapping[str, str]
    ) -> None:
        """Start the process, which makes the object. environment: added to ours."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        told = theirs, dict(environment), make, arguments
        self._process = context.Process(target=_serve, args=told, daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def tell(self, what: str, *arguments: object, **options: object) -> None:
        """Have a method called."""
        self._pipe.send((what, arguments, options))

    def answer(self) -> Any:  # noqa: ANN401 - as the method
        """Return what the method returned. Raises KVStoreError, also when the process has ended."""
        try:
            result = self._pipe.recv()
        except EOFError:
            result = KVStoreError("the child process has ended")
        if isinstance(result, KVStoreError):
            raise result
        return result

    def call(self, what: str, *arguments: object, **options: object) -> Any:  # noqa: ANN401 - likewise
        """Have a method called, and wait until that is done."""
        self.tell(what, *arguments, **options)
        return self.answer()


def _serve(
    pipe: Connection,
    environment: dict[str, str],
    make: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    os.environ.update(environment)
    try:
        served = make(*arguments)
        while True:
            what, given, options = pipe.recv()
            pipe.send(getattr(served, what)(*given, **options))
    except EOFError:  # the parent has ended
        return
    except KVStoreError as exc:
        pipe.send(exc)
