"""The contract of a tier, as tests that a tier's own tests inherit.

docs/how-to/write-a-tier.md shows a whole tier with its test. pytest has to be installed:
`pip install "kvstore[testing]"` brings it.
"""

import pytest

pytest.register_assert_rewrite("kvstore.testing.contract")  # failures show both values

from kvstore.testing.contract import (  # noqa: E402 - after the line that has to come first
    SLOT_BYTES,
    SLOTS,
    ArrayMemory,
    ReadOnlyTierContract,
    TierContract,
    content,
    finish,
    key,
)

__all__ = [
    "SLOTS",
    "SLOT_BYTES",
    "ArrayMemory",
    "ReadOnlyTierContract",
    "TierContract",
    "content",
    "finish",
    "key",
]
