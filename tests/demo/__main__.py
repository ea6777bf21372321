"""Run a demo: `python -m tests.demo`, or with `--pd` that of prefill and decode engines."""

from __future__ import annotations

import argparse
import sys

from tests.demo import offload, pd


def main() -> int:
    """Run the chosen one; the exit status is 0 only if everything is as promised."""
    parser = argparse.ArgumentParser(prog="python -m tests.demo", description=__doc__)
    parser.add_argument("--pd", action="store_true", help="a prefill engine, two decode engines")
    return pd.main() if parser.parse_args().pd else offload.main()


if __name__ == "__main__":
    sys.exit(main())
