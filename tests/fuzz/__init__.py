"""Wrong messages by the million: `python -m tests.fuzz --messages 10000000`."""
