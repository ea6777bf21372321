"""The kernel's index arithmetic once more, in NumPy: which bytes item i of a launch moves.

kernel.cu does the same in C. On a CPU it is this one that moves bytes for the fake CUDA; that both
agree is shown by compiling kernel.cu for the CPU (test_gpu_kernel.py) and, on a GPU, by the tests
in tests/gpu/.
"""

from __future__ import annotations

import numpy as np

from connectors.copies.gpu.plan import PLACE, RUN, Words

ENGINE, STRIDE, SLOT, BYTES = (RUN.index(name) for name in ("engine", "stride", "slot", "bytes"))
PART, BLOCK = (PLACE.index(name) for name in ("slot", "block"))


def items(tiles: Words, places: Words) -> tuple[Words, Words, Words]:
    """Return for each item of a launch: address in the engine, in a slot, and bytes."""
    item = np.arange(len(tiles) * len(places))
    place, tile = places[item // len(tiles)], tiles[item % len(tiles)]
    engine = tile[:, ENGINE] + place[:, BLOCK] * tile[:, STRIDE]
    return engine, place[:, PART] + tile[:, SLOT], tile[:, BYTES]
