"""The kernel itself: it compiles for GPUs, and run on a CPU it moves what its twin says.

Neither needs a GPU. A C compiler with loops around the source runs the very lines that a GPU runs,
thread after thread; what that cannot show is speed, and what threads do at the same time.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.copies.gpu.plan import Words, tiles_of
from tests.harness.compiled import library
from tests.harness.gpu_layouts import Bytes
from tests.harness.gpu_twin import items

ROOT = Path(__file__).parent.parent
KERNEL = ROOT / "connectors" / "copies" / "gpu" / "kernel.cu"
ARCHITECTURES = (80, 90, 100, 120)
BLOCKS = 5

Run = Callable[..., int]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    function: Run = library("kernel_on_cpu.c", tmp_path_factory.mktemp("kernel")).run
    return function


def addresses(rng: random.Random, sizes: list[int]) -> tuple[Words, Words, list[Bytes]]:
    """Make memory, runs in it, and places; addresses are of any alignment."""
    shift = rng.choice([0, 0, 4, 1])
    stride = sum(sizes) + rng.choice([0, 16, 5])
    engine = np.random.default_rng(rng.randrange(99)).integers(
        0, 256, stride * BLOCKS + 64, np.uint8
    )  # fmt: skip
    slots = np.random.default_rng(rng.randrange(99)).integers(
        0, 256, sum(sizes) * BLOCKS + 64, np.uint8
    )  # fmt: skip
    base = engine.ctypes.data + shift
    at = np.cumsum([0, *sizes[:-1]])
    runs = np.array(
        [[base + int(a), stride, int(a), n] for a, n in zip(at, sizes, strict=True)], np.uint64
    )  # fmt: skip
    order = rng.sample(range(BLOCKS), rng.randint(1, BLOCKS))
    first = slots.ctypes.data + rng.choice([0, 0, 8, 3])
    places = np.array([[first + i * sum(sizes), b] for i, b in enumerate(order)], np.uint64)
    return runs, places, [engine, slots]


@settings(max_examples=150)
@given(
    st.integers(0, 10**9),
    st.lists(st.sampled_from([1, 3, 16, 48, 160, 1000, 4096, 40000]), min_size=1, max_size=4),
    st.booleans(),
)
def test_the_kernel_moves_what_its_twin_says(
    run: Run, seed: int, sizes: list[int], store: bool
) -> None:
    rng = random.Random(seed)
    runs, places, memory = addresses(rng, sizes)
    tiles = tiles_of(runs, rng.choice([64, 512, 32768]))
    before = [m.copy() for m in memory]
    expected = [m.copy() for m in memory]
    to = expected[1] if store else expected[0]
    for row in zip(*(column.tolist() for column in items(tiles, places)), strict=True):
        engine, slot, size = row[0] - memory[0].ctypes.data, row[1] - memory[1].ctypes.data, row[2]
        if store:
            to[slot : slot + size] = before[0][engine : engine + size]
        else:
            to[engine : engine + size] = before[1][slot : slot + size]
    count = len(tiles) * len(places)
    misaligned = run(
        ctypes.c_void_p(tiles.ctypes.data),
        ctypes.c_ulonglong(len(tiles)),
        ctypes.c_void_p(places.ctypes.data),
        ctypes.c_ulonglong(count),
        int(store),
        rng.randint(1, min(count, 4)),
        rng.choice([1, 7, 32]),
    )
    assert not misaligned
    for found, wanted in zip(memory, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def nvrtc() -> ctypes.CDLL | None:
    """NVIDIA's run-time compiler, from the package that torch and cupy for CUDA bring along."""
    try:
        import nvidia
    except ImportError:
        return None
    for folder in nvidia.__path__:
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*[0-9]")):
            if "builtins" not in path.name and ".alt." not in path.name:
                return ctypes.CDLL(str(path))
    return None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernel_compiles_for_the_gpus_that_are_served(architecture: int) -> None:
    """Without a GPU: the compiler is a library like any other."""
    compiler = nvrtc()
    if compiler is None:
        pytest.skip("NVIDIA's run-time compiler (package nvidia-cuda-nvrtc) is not installed")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = KERNEL.read_bytes()
    assert not compiler.nvrtcCreateProgram(
        ctypes.byref(program), source, b"kernel.cu", 0, None, None
    )
    options = [
        f"--gpu-architecture=sm_{architecture}".encode(),
        b"--std=c++17",
        b"--ptxas-options=-v",
    ]
    code = compiler.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetProgramLog(program, text)
    log = text.value.decode()
    assert code == 0, log
    assert "0 bytes spill stores" in log
    assert "kvstore_move" in log
