"""Engines, stores, disks and peers for tests: rigs that many tests share, and no tests."""
