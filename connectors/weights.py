"""The name of a model's weights: a digest of all of their files' content, for any engine.

Nothing less than the content will do. A hub's branch moves, a folder is written anew, and one
changed norm in a shard of 5 GiB changes every KV block. So each file is read whole, once: its
digest is kept in a file of the user's own under (device, inode, size, mtime, ctime). A user can
set back a file's mtime, not its ctime.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.core.errors import KVStoreError

log = logging.getLogger(__name__)

SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npy", ".npz", ".tensors")
)
# Code of the model, and JSON files that say which tensors are where, or how values are scaled.
CODE = ".py"
COMPILED = (".so", ".pyd")  # and code that is no Python
SIDE_FILES = ("index", "quant", "scale", "processor", "adapter")
FILES_MAX = 100_000
MEMORY_BYTES_MAX = 4 << 20
KNOWN = "weights.json"
_REMEMBERED_MAX = 4096  # files
_RACY_NS = 2_000_000_000  # a file changed so lately may change again at the same time stamp
_THREADS = 8
_TOLD_BYTES = 8 << 30  # from here on reading takes seconds: say so


class UnnamedError(KVStoreError):
    """These weights cannot be named. The text says why."""


def fingerprint(place: Path, memory: Path | None) -> str:
    """Digest the weights in a folder, or of a single file. Raises UnnamedError.

    memory: a folder of this user's own for what was read before; made if need be. Processes that
    ask at the same time read once. None: all is read.
    """
    try:
        files = _files(place, _decides_weights)
        if not any(file.suffix in SUFFIXES for _, file in files):
            raise UnnamedError(f"no weight files in {place}")
        with _remembered(memory) as known:
            digests = _digests([file for _, file in files], known)
    except OSError as exc:
        raise UnnamedError(f"{exc.filename or place}: {exc.strerror}") from exc
    return _whole(files, digests)


def code_fingerprint(place: Path) -> str:
    """Digest the code in a folder, or in a single file. Raises UnnamedError."""
    try:
        files = _files(place, lambda file: file.suffix in COMPILED or file.suffix == CODE)
    except OSError as exc:
        raise UnnamedError(f"{exc.filename or place}: {exc.strerror}") from exc
    if not files:
        raise UnnamedError(f"no code in {place}")
    return _whole(files, [digest_of(file) for _, file in files])


def _whole(files: list[tuple[str, Path]], digests: list[str]) -> str:
    whole = hashlib.sha256()
    for (name, _), digest in zip(files, digests, strict=True):
        whole.update(json.dumps([name, digest]).encode())
    return whole.hexdigest()


def digest_of(file: Path) -> str:
    """Digest a small file. Raises UnnamedError."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as exc:
        raise UnnamedError(f"{file}: {exc.strerror}") from exc


def _decides_weights(file: Path) -> bool:
    side = file.suffix == ".json" and any(part in file.name for part in SIDE_FILES)
    return file.suffix in SUFFIXES or file.suffix == CODE or side


def _files(place: Path, counts: Callable[[Path], bool]) -> list[tuple[str, Path]]:
    """List the files that count, by their names in the folder; links are followed."""
    if place.is_file():
        return [(place.suffix, place)]  # under another name it is the same model
    found = []
    seen: set[tuple[int, int]] = set()

    def failed(exc: OSError) -> None:
        raise exc

    for folder, folders, names in os.walk(place, followlinks=True, onerror=failed):
        here = Path(folder).stat()
        if (here.st_dev, here.st_ino) in seen:
            folders.clear()  # a link back to where it is
            continue
        seen.add((here.st_dev, here.st_ino))
        for name in names:
            file = Path(folder) / name
            if counts(file):
                found.append((file.relative_to(place).as_posix(), file))
        if len(found) > FILES_MAX:
            raise UnnamedError(f"{place} has {len(found)} weight files, expected up to {FILES_MAX}")
    return sorted(found)


def _digests(files: list[Path], known: dict[str, str]) -> list[str]:
    states = [file.stat() for file in files]
    unknown = sum(state.st_size for state in states if _key(state) not in known)
    if unknown >= _TOLD_BYTES:
        log.info("reading %.0f GiB of weights once, to name them by content", unknown / (1 << 30))
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda file: _digest(file, known), files))
    known.update({key: digest for key, digest, old in found if old})
    return [digest for _, digest, _ in found]


def _digest(file: Path, known: dict[str, str]) -> tuple[str, str, bool]:
    """Return a file's key, its digest, and whether that may be remembered."""
    with file.open("rb", buffering=0) as source:
        before = os.fstat(source.fileno())
        if not stat.S_ISREG(before.st_mode):
            raise UnnamedError(f"{file} is no regular file")
        key = _key(before)
        if key in known:
            return key, known[key], True
        now_ns = time.time_ns()
        digest = hashlib.file_digest(source, "sha256").hexdigest()
        if _key(os.fstat(source.fileno())) != key:
            raise UnnamedError(f"{file} changed while it was read")
    return key, digest, max(before.st_mtime_ns, before.st_ctime_ns) < now_ns - _RACY_NS


def _key(state: os.stat_result) -> str:
    change = (state.st_mtime_ns, state.st_ctime_ns)
    return ":".join(map(str, (state.st_dev, state.st_ino, state.st_size, *change)))


@contextlib.contextmanager
def _remembered(memory: Path | None) -> Iterator[dict[str, str]]:
    """Give what is known of files by key, and keep what is added; one process at a time."""
    if memory is None or not _is_ours(memory):
        yield {}
        return
    with (memory / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = _read(memory / KNOWN)
        before = dict(known)
        yield known
        if known != before:
            _write(memory / KNOWN, known)


def _is_ours(memory: Path) -> bool:
    """Tell whether the folder is ours alone; what others could write there would be believed."""
    try:
        memory.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = memory.lstat()
    except OSError as exc:
        log.info("digests of weights are not kept in %s: %s", memory, exc.strerror)
        return False
    ours = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
    if not ours or state.st_mode & 0o077:
        log.warning(
            "digests of weights are not kept in %s: it is of user %d with mode %o,"
            " expected user %d and mode 700",
            memory,
            state.st_uid,
            stat.S_IMODE(state.st_mode),
            os.geteuid(),
        )
        return False
    return True


def _read(file: Path) -> dict[str, str]:
    try:
        with file.open("rb") as source:
            found = json.loads(source.read(MEMORY_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(file: Path, known: dict[str, str]) -> None:
    """Keep the newest. A write that fails costs reading again, so it is only said."""
    new = file.with_name("new")
    try:
        new.touch(0o600)
        new.write_text(json.dumps(dict(list(known.items())[-_REMEMBERED_MAX:])))
        new.replace(file)
    except OSError as exc:
        log.info("digests of weights are not kept: %s", exc.strerror)
