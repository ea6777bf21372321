"""What a newcomer runs first: `python -m tests.demo`, `python -m tests.demo --pd`."""
