"""What a store tells of its blocks' token ids is compared by the hash of a real vLLM."""

from __future__ import annotations

from array import array

import pytest

from tests.bench.models import prompt

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_O27_token_ids_are_compared_by_vllms_own_hash(algorithm: str) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request as Prompt

    from connectors.vllm_scheduler import next_hash_of

    hashed = get_hash_fn_by_name(algorithm)
    init_none_hash(hashed)
    tokens, hasher = prompt(95_900, 70), get_request_block_hasher(16, hashed)
    plain = Prompt("p", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    salted = Prompt("s", tokens, plain.sampling_params, None, cache_salt="x", block_hasher=hasher)
    next_hash, found, last = next_hash_of(algorithm), list[bytes](), None
    for first in range(0, 64, 16):
        last = next_hash(last, array("I", tokens[first : first + 16]))
        found.append(last)
    assert found == plain.block_hashes
    assert found[0] != salted.block_hashes[0], "of a salt none is kept"
