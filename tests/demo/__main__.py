"""Run a demo: `python -m tests.demo`, or with `--pd` that of prefill and decode engines."""

from __future__ import annotations

import argparse
import sys

from tests.demo import offload, pd
from tests.demo.stage import play


def main() -> int:
    """Run the chosen one."""
    parser = argparse.ArgumentParser(prog="python -m tests.demo", description=__doc__)
    parser.add_argument("--pd", action="store_true", help="a prefill engine, two decode engines")
    return play(pd.HandOver if parser.parse_args().pd else offload.Offload)


if __name__ == "__main__":
    sys.exit(main())
