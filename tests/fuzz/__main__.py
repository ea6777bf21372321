"""Millions of wrong messages: `python -m tests.fuzz --messages 10000000`."""

from __future__ import annotations

import sys

from tests.fuzz.campaign import main

if __name__ == "__main__":
    sys.exit(main())
