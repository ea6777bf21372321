"""The few things that copies need of CUDA, by number: streams, events, launches, pinned memory.

Everything here returns before the device has done it, but for `pin`, `unpin` and memory that is
made at the start. A call that CUDA refuses raises TierIOError with CUDA's own words.

No call that copies make holds the GIL while it is in CUDA, where it may wait for a lock, such as
while memory is being registered. cupy gives the GIL up in most calls, but not in those about
events, and it has none for a batch of copies; these go to the driver by ctypes, which does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.core.errors import NotSupported, TierIOError

try:
    import cupy
except ImportError:  # an engine on a GPU is refused without it, see Cuda
    cupy = None

THREADS = 512
_KERNEL = "kvstore_move"
_LOWEST_PRIORITY = 0
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BESIDE_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_DRIVER = "libcuda.so.1"
_BATCH = "cuMemcpyBatchAsync_v2"


class Launch(msgspec.Struct, frozen=True):
    """One launch of the kernel; addresses as the device sees them."""

    tiles: int
    tile_count: int
    places: int
    place_count: int
    store: bool
    blocks: int  # thread blocks, at most one per item


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of CUDA 13: the order of reads, and hints that we do not give."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_type", ctypes.c_int),
        ("source_id", ctypes.c_int),
        ("target_type", ctypes.c_int),
        ("target_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


class _Stream(msgspec.Struct, frozen=True):
    """A stream in the form that libraries of CUDA exchange them."""

    number: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of that form, and the stream."""
        return 0, self.number


class Cuda:
    """CUDA by way of cupy, and of the driver for the calls that cupy has not.

    Streams and events are numbers. Callable from any thread.
    """

    def __init__(self, index: int) -> None:
        """index: of the GPU. Raises NotSupported if cupy is missing or CUDA too old."""
        if cupy is None:
            raise NotSupported("engines on a GPU need cupy: pip install 'kvstore[cuda]'")
        self._index = index
        self._runtime = cupy.cuda.runtime
        try:
            self._use()
            self._check_device()
        except self._runtime.CUDARuntimeError as exc:
            raise NotSupported(f"GPU {index} cannot be used by cupy: {exc}") from exc
        self._prepare_driver()
        self._kernel = self._compile()
        self._streams: dict[int, Any] = {}
        self._events: list[int] = []
        self._device_memory: list[int] = []
        self._host_memory: list[Any] = []

    def _prepare_driver(self) -> None:
        try:
            self._driver = ctypes.CDLL(_DRIVER)
            self._batch: Callable[..., int] = getattr(self._driver, _BATCH)
        except (OSError, AttributeError) as exc:
            raise NotSupported(f"the NVIDIA driver is too old, expected CUDA 13: {exc}") from exc
        self._attributes = _Attributes(order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTE)
        self._first = (ctypes.c_size_t * 1)(0)

    def _compile(self) -> Any:  # noqa: ANN401 - cupy's
        """Compile the kernel for the GPU that is there; cupy keeps the result on disk."""
        code = Path(__file__).with_name("kernel.cu").read_text(encoding="utf-8")
        try:
            return cupy.RawModule(code=code, options=("--std=c++17",)).get_function(_KERNEL)
        except (cupy.cuda.compiler.CompileException, ImportError, RuntimeError) as exc:
            raise NotSupported(
                f"the copy kernel cannot be compiled for GPU {self._index}: {exc}"
            ) from exc

    def _use(self) -> None:
        """Make calls of this thread go to our GPU; they go to the first one otherwise."""
        self._runtime.setDevice(self._index)

    def _check_device(self) -> None:
        read = self._runtime.deviceGetAttribute
        if not read(self._runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, self._index):
            raise NotSupported(
                f"GPU {self._index} does not take host addresses of pinned memory, which copies use"
            )

    def _call(self, what: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - cupy's
        try:
            self._use()
            return what(*arguments)
        except self._runtime.CUDARuntimeError as exc:
            raise TierIOError(f"GPU {self._index}: {exc}") from exc

    def relax_capture(self) -> None:
        """Let the calling thread make any call while another one captures a CUDA graph.

        Without, memory that is made or pinned meanwhile spoils the graph. The driver keeps it for
        the thread.
        """
        exchange = self._driver.cuThreadExchangeStreamCaptureMode
        code = self._call(exchange, ctypes.byref(ctypes.c_int(_RELAXED)))
        if code:
            raise TierIOError(
                f"GPU {self._index}: cuThreadExchangeStreamCaptureMode answered {code}"
            )

    def bus_id(self) -> str:
        """Return where on the PCI bus the GPU is, as 0000:65:00.0."""
        return str(self._call(self._runtime.deviceGetPCIBusId, self._index))

    def compute_stream(self) -> int:
        """Return the stream on which the calling thread's engine computes, with torch."""
        return int(torch.cuda.current_stream(self._index).cuda_stream)

    def new_stream(self) -> int:
        """Make a stream of the lowest priority that waits for no other by itself."""
        flags = cupy.cuda.runtime.streamNonBlocking
        number = self._call(self._runtime.streamCreateWithPriority, flags, _LOWEST_PRIORITY)
        self._streams[number] = cupy.cuda.Stream.from_external(_Stream(number))
        return int(number)

    def new_event(self, *, timing: bool = False) -> int:
        """Make an event; without timing it costs less."""
        flags = self._runtime.eventDefault if timing else self._runtime.eventDisableTiming
        self._events.append(self._call(self._runtime.eventCreateWithFlags, flags))
        return self._events[-1]

    def record(self, event: int, stream: int) -> None:
        """Let an event stand for all that was queued on a stream so far."""
        self._use()
        code = self._driver.cuEventRecord(ctypes.c_void_p(event), ctypes.c_void_p(stream))
        if code:
            raise TierIOError(f"GPU {self._index}: cuEventRecord answered {code}")

    def wait(self, stream: int, event: int) -> None:
        """Let what is queued on a stream from here on wait for an event as it stands now.

        The event may be recorded anew right after.
        """
        self._call(self._runtime.streamWaitEvent, stream, event, 0)

    def reached(self, event: int) -> bool:
        """Tell whether all that an event stands for is done. Raises what failed before, too."""
        self._use()
        code = self._driver.cuEventQuery(ctypes.c_void_p(event))
        if code not in {0, _NOT_READY}:
            raise TierIOError(f"GPU {self._index}: cuEventQuery answered {code}")
        return bool(code == 0)

    def milliseconds(self, begin: int, end: int) -> float:
        """Return the time between two timing events that were reached."""
        return float(self._call(self._runtime.eventElapsedTime, begin, end))

    def launch(self, launch: Launch, stream: int) -> None:
        """Queue the kernel as one grid, whose thread blocks take turns at the items."""
        items = launch.tile_count * launch.place_count
        self._use()
        try:
            with self._streams[stream]:
                self._kernel(
                    (min(launch.blocks, items),),
                    (THREADS,),
                    (
                        np.uint64(launch.tiles),
                        np.uint64(launch.tile_count),
                        np.uint64(launch.places),
                        np.uint64(items),
                        np.int32(launch.store),
                    ),
                )
        except cupy.cuda.driver.CUDADriverError as exc:
            raise TierIOError(f"GPU {self._index}: {exc}") from exc

    def copy(
        self,
        to: NDArray[np.uint64],
        source: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
        stream: int,
    ) -> None:
        """Queue copies between addresses as one batch; the arrays are read before it returns.

        By the driver: cupy has no call for a batch.
        """
        self._use()
        to, source, sizes = (np.ascontiguousarray(array) for array in (to, source, sizes))
        code = self._batch(
            ctypes.c_void_p(to.ctypes.data),
            ctypes.c_void_p(source.ctypes.data),
            ctypes.c_void_p(sizes.ctypes.data),
            ctypes.c_size_t(len(to)),
            ctypes.byref(self._attributes),
            self._first,
            ctypes.c_size_t(1),
            ctypes.c_void_p(stream),
        )
        if code:
            raise TierIOError(f"GPU {self._index}: {_BATCH} answered {code} for {len(to)} copies")

    def table(self, rows: NDArray[np.uint64], stream: int) -> int:
        """Put a table on the device, in a stream's order; return its address. Kept for good."""
        address = self.memory(max(1, rows.nbytes))
        if rows.nbytes:
            staged = self.pinned(rows.nbytes)  # the copy may be under way when this returns
            staged[:] = rows.reshape(-1).view(np.uint8)
            kind = self._runtime.memcpyHostToDevice
            self._call(
                self._runtime.memcpyAsync, address, staged.ctypes.data, rows.nbytes, kind, stream
            )
        return address

    def memory(self, size: int) -> int:
        """Make device memory; return its address. Kept until `close`.

        Not from cupy's pool, which works on the default stream.
        """
        self._device_memory.append(self._call(self._runtime.malloc, size))
        return self._device_memory[-1]

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Make host memory that the device reads and writes. Kept until `close`."""
        held = self._call(cupy.cuda.alloc_pinned_memory, size)
        self._host_memory.append(held)
        return np.frombuffer(held, np.uint8, size)

    def pin(self, address: int, size: int) -> None:
        """Let the device read and write memory of the host."""
        self._call(self._runtime.hostRegister, address, size, 0)

    def unpin(self, address: int) -> None:
        """Let the device touch it no more."""
        self._call(self._runtime.hostUnregister, address)

    def close(self) -> None:
        """Give back streams, events and memory; nothing is under way."""
        for free, numbers in (
            (self._runtime.eventDestroy, self._events),
            (self._runtime.streamDestroy, list(self._streams)),
            (self._runtime.free, self._device_memory),
        ):
            while numbers:
                self._call(free, numbers.pop())
        self._streams.clear()
        self._host_memory.clear()
