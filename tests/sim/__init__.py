"""The whole cache in one thread from one seed; `python -m tests.sim` replays a world."""
