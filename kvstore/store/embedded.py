"""The process of a private store, which kvstore.launch starts; it ends with its last client."""

from __future__ import annotations

import json
import logging
import socket
import sys

from kvstore.arguments import prepare_streams
from kvstore.config import parse
from kvstore.core.errors import KVStoreError
from kvstore.listener import Listener
from kvstore.logs import log_to_stderr
from kvstore.store.server import serve

log = logging.getLogger(__name__)

LINGER_S = 3.0
_LINE = "(kvstore pid=%(process)d) %(levelname)s %(asctime)s %(message)s"  # among its engine's


def main() -> None:
    """Run as the child of launch.ensure(): settings as JSON, then the socket and its lock."""
    prepare_streams()  # an engine may have closed its own
    log_to_stderr(_LINE)
    config = parse(json.loads(sys.argv[1]), source="private store")
    sock, lock_fd = socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    listener = Listener(config.server.socket, sock, lock_fd)
    try:
        serve(config, listener, linger_s=LINGER_S)
    except KVStoreError as exc:
        log.error("the private store cannot run: %s", exc)
        sys.exit(1)


if __name__ == "__main__":
    main()
