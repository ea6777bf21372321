"""Make waiting engine processes leave the CPU; found by being first on PYTHONPATH.

vLLM's shared-memory readers spin on os.sched_yield, which on a machine with few cores starves the
very process they wait for: steps that take milliseconds then take tens of seconds.
"""

import os
import time


def _sleep_instead() -> None:
    time.sleep(50e-6)  # long enough to be descheduled, short beside one engine step


os.sched_yield = _sleep_instead
