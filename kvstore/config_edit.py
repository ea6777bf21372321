"""Changes one setting in a file of settings, and leaves every other byte of it as it is."""

from __future__ import annotations

import codecs
import contextlib
import copy
import os
import re
import stat
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from kvstore.config import ConfigFile, of_text, text_of
from kvstore.core.errors import ConfigError, KVStoreError

_VALUE = r"""("(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[0-9][0-9_]*)"""


class NotWritten(KVStoreError):
    """The file of settings is as it was."""


def with_value(text: str, section: str, name: str, value: str) -> str:
    """Return a file's text with another value of a setting, as TOML has it; all else is kept.

    Any place that looks like the setting is tried: the right one is that with which the file says
    the same, except for this value. Raises NotWritten where there is none.
    """
    expected: dict[str, Any] = copy.deepcopy(tomllib.loads(text))
    expected[section][name] = tomllib.loads(f"value = {value}")["value"]
    for match in re.finditer(rf"\b{re.escape(name)}[\"']?[ \t]*=[ \t]*{_VALUE}", text):
        changed = text[: match.start(1)] + value + text[match.end(1) :]
        with contextlib.suppress(tomllib.TOMLDecodeError):
            if tomllib.loads(changed) == expected:
                return changed
    raise NotWritten(f"[{section}] {name} is written in a way that only an editor can change")


def persist(source: ConfigFile, section: str, name: str, value: str) -> None:
    """Change a setting in a file: atomically, with the same mode and owner.

    source: the file, and what a store has read of it. Raises NotWritten for a file that has changed
    since then, that cannot be written, or that would be wrong with this value.
    """
    path = Path(os.path.realpath(source.path))  # a link stays one
    try:
        data = text_of(path)
        if ConfigFile.of(source.path, data) != source:
            raise NotWritten("it has changed since the store read it: `kvstore reload` first")
        mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
        text = data.removeprefix(mark).decode()
        changed = mark + with_value(text, section, name, value).encode()
        of_text(changed, source.path)
        _replace(path, changed)
    except ConfigError as exc:
        raise NotWritten(f"not written: {exc}") from None
    except NotWritten as exc:
        raise NotWritten(f"{source.path}: not written: {exc}") from None
    except OSError as exc:
        raise NotWritten(f"{source.path}: not written: {exc.strerror}") from exc


def _replace(path: Path, data: bytes) -> None:
    """Put a new file in the place of another. Raises OSError."""
    before = path.stat()
    if not os.access(path, os.W_OK):  # the folder's permission alone would do for a rename
        raise PermissionError(13, "Permission denied", str(path))
    fd, made = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if (os.fstat(fd).st_uid, os.fstat(fd).st_gid) != (before.st_uid, before.st_gid):
                os.fchown(fd, before.st_uid, before.st_gid)
            os.fchmod(fd, stat.S_IMODE(before.st_mode))
            os.fsync(fd)
        Path(made).replace(path)
    except BaseException:
        Path(made).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
