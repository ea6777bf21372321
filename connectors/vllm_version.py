"""Which vLLM this is. Imported before everything else of vLLM, so that an unknown one is named.

Raises NotSupported on import for a version that is not served. Checked against 0.32 (runs in the
tests) and 0.33 (its source).
"""

from __future__ import annotations

import re

import vllm

from kvstore.core.errors import NotSupported

VERSIONS = ("0.32", "0.33")

VERSION = ".".join(re.findall(r"\d+", vllm.__version__)[:2])

if VERSION not in VERSIONS:
    raise NotSupported(
        f"kvstore does not serve this engine: vLLM {vllm.__version__},"
        f" served are {', '.join(VERSIONS)}"
    )
