"""The border to CUDA as far as it can be shown without: a stub of the driver, answers by hand."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from connectors.copies.gpu import cuda
from connectors.copies.gpu.device import CudaDevice
from kvstore.core.errors import NotSupported, TierIOError
from tests.harness.compiled import library


def on_stub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int
) -> tuple[cuda.Cuda, ctypes.CDLL]:
    """The border, with a stub of the driver under it, and the stub."""
    driver = library("driver_stub.c", tmp_path)
    monkeypatch.setattr("connectors.copies.gpu.cuda.ctypes.CDLL", lambda _: driver)
    made = cuda.Cuda.__new__(cuda.Cuda)
    monkeypatch.setattr(made, "_use", lambda: None, raising=False)
    made._index = index
    made._prepare_driver()
    return made, driver


def test_a_batch_of_copies_reaches_the_driver_as_its_header_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments of ctypes against a stub with the types of CUDA 13; cupy has no such call."""
    made, driver = on_stub(tmp_path, monkeypatch, 0)
    source = np.arange(64, dtype=np.uint8)
    target = np.zeros(64, np.uint8)
    stride = np.array([[0, 32], [16, 0]], np.uint64)  # a column of it is not contiguous
    made.copy(
        target.ctypes.data + stride[:, 0],
        source.ctypes.data + stride[:, 1],
        np.array([8, 4], np.uint64),
        0x7F0000001234,
    )
    assert target[:8].tolist() == list(range(32, 40))
    assert target[16:20].tolist() == list(range(4))
    assert target.sum() == sum(range(32, 40)) + sum(range(4))
    found = {
        "stream": ctypes.c_void_p.in_dll(driver, "last_stream").value,
        "order": ctypes.c_int.in_dll(driver, "last_order").value,
        "flags": ctypes.c_uint.in_dll(driver, "last_flags").value,
    }
    assert found == {"stream": 0x7F0000001234, "order": 1, "flags": 1}
    nothing = np.empty(0, np.uint64)
    with pytest.raises(TierIOError, match="answered 1 for 0 copies"):
        made.copy(nothing, nothing, nothing, 1)


def test_a_driver_without_batches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cuda.Cuda.__new__(cuda.Cuda)
    monkeypatch.setattr(cuda, "_BATCH", "no_such_call")
    monkeypatch.setattr(cuda, "_DRIVER", None)  # this process, which has no such call
    with pytest.raises(NotSupported, match="driver is too old, expected CUDA 13"):
        made._prepare_driver()


def test_an_event_is_reached_not_yet_or_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked forever, a device that has failed would never end a job."""
    made, driver = on_stub(tmp_path, monkeypatch, 3)
    event, stream = 0x7F0000005678, 0x7F0000001234
    for code, found in ((600, False), (0, True)):
        ctypes.c_int.in_dll(driver, "answer").value = code
        assert made.reached(event) is found
    made.record(event, stream)
    assert ctypes.c_void_p.in_dll(driver, "last_event").value == event
    assert ctypes.c_void_p.in_dll(driver, "last_stream").value == stream
    ctypes.c_int.in_dll(driver, "answer").value = 700
    with pytest.raises(TierIOError, match="GPU 3: cuEventQuery answered 700"):
        made.reached(event)
    with pytest.raises(TierIOError, match="GPU 3: cuEventRecord answered 700"):
        made.record(event, stream)


def test_a_thread_that_may_call_while_another_captures_says_so_to_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, driver = on_stub(tmp_path, monkeypatch, 3)
    made.relax_capture()
    assert ctypes.c_int.in_dll(driver, "last_mode").value == 2, "CU_STREAM_CAPTURE_MODE_RELAXED"
    ctypes.c_int.in_dll(driver, "answer").value = 1
    with pytest.raises(TierIOError, match="cuThreadExchangeStreamCaptureMode answered 1"):
        made.relax_capture()
    device = CudaDevice.__new__(CudaDevice)
    device._cuda = made
    device.enter_thread()
    assert "may fail to capture CUDA graphs: GPU 3" in caplog.text


def test_what_cuda_refuses_has_its_words_and_the_gpu() -> None:
    def refuse(*_: object) -> None:
        raise OSError("cudaErrorMemoryAllocation: out of memory")

    made = cuda.Cuda.__new__(cuda.Cuda)
    made._index = 3
    made._runtime = SimpleNamespace(
        setDevice=lambda _: None, hostRegister=refuse, CUDARuntimeError=OSError
    )
    with pytest.raises(TierIOError, match="GPU 3: cudaErrorMemoryAllocation"):
        made.pin(4096, 4096)


def test_O17_closing_twice_gives_everything_back_once() -> None:
    freed, made = list[int](), cuda.Cuda.__new__(cuda.Cuda)
    made._index = 0
    made._runtime = SimpleNamespace(
        setDevice=lambda _: None, eventDestroy=freed.append, streamDestroy=freed.append,
        free=freed.append, CUDARuntimeError=OSError,
    )  # fmt: skip
    made._streams, made._events, made._device_memory, made._host_memory = {1: None}, [2], [3], []
    made.close()
    made.close()
    assert sorted(freed) == [1, 2, 3]
