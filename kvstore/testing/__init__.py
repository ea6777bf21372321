"""The contracts of a tier and of a policy, as tests that one's own tests inherit.

docs/how-to/write-a-tier.md and write-a-policy.md show whole ones with their tests. pytest has to be
installed: `pip install "kvstore[testing]"` brings it.
"""

import pytest

# Failures show both values.
pytest.register_assert_rewrite("kvstore.testing.contract", "kvstore.testing.policy_contract")

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
from kvstore.testing.policy_contract import PolicyContract  # noqa: E402

__all__ = [
    "SLOTS",
    "SLOT_BYTES",
    "ArrayMemory",
    "PolicyContract",
    "ReadOnlyTierContract",
    "TierContract",
    "content",
    "finish",
    "key",
]
