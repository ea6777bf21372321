"""Decides which block is where. Plain single-threaded Python: imports nothing else of ours."""
