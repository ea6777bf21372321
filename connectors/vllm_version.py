"""Which vLLM this is, and its log. Imported before all else of vLLM: an unknown one is named.

Raises NotSupported on import for a version that is not served. Checked against 0.32 (runs in the
tests) and 0.33 (its source).
"""

from __future__ import annotations

import logging
import re

import vllm

from kvstore.core.errors import NotSupported

VERSIONS = ("0.32", "0.33")

VERSION = ".".join(re.findall(r"\d+", vllm.__version__)[:2])

if VERSION not in VERSIONS:
    raise NotSupported(
        f"kvstore does not serve this engine: vLLM {vllm.__version__},"
        f" served are {', '.join(VERSIONS)}"
    )

_vllm_log = logging.getLogger("vllm.kvstore")


class ToVllm(logging.Handler):
    """Hands records to vLLM's handlers, as they are configured when a record comes."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log it as vLLM's, unless that is below vLLM's level."""
        if _vllm_log.isEnabledFor(record.levelno):
            _vllm_log.handle(record)


def log_as_vllm() -> None:
    """Have everything that an engine process has of ours log as vLLM; safe to call twice."""
    for name in ("connectors", "kvstore", "tiers"):
        logger = logging.getLogger(name)
        if not any(isinstance(handler, ToVllm) for handler in logger.handlers):
            logger.addHandler(ToVllm())
            logger.setLevel(logging.DEBUG)  # vLLM's level decides
            logger.propagate = False
