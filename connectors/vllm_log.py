"""Sends the connector's log to vLLM's: its level, its time and process, its own form of a line."""

from __future__ import annotations

import logging

OURS = ("connectors", "kvstore", "tiers")
_target = logging.getLogger("vllm.kvstore")


class ToVllm(logging.Handler):
    """Hands records to vLLM's handlers, as they are configured when a record comes."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log it as vLLM's, unless that is below vLLM's level."""
        if _target.isEnabledFor(record.levelno):
            _target.handle(record)


def log_as_vllm() -> None:
    """Have everything that an engine process has of ours log as vLLM; safe to call twice."""
    for name in OURS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, ToVllm) for handler in logger.handlers):
            logger.addHandler(ToVllm())
            logger.setLevel(logging.DEBUG)  # vLLM's level decides
            logger.propagate = False
