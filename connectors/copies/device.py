"""Copies for the device that an engine's KV tensors are on: one interface, two devices.

    step thread    mark() ---- what the engine has been asked to compute up to here
    copy thread    copier.copy(moves, after=mark) -> Copying ---- over()?
    copy thread    passed(mark)? ... for what the device does not move itself
    step thread    fence(copies) ---- what the engine computes from here on waits for them
    link thread    pin(extent) ... unpin(extent) ---- slot memory comes and goes

In host memory (host.py) a copy is made by the call that asks for it, so there is nothing to wait
for. On a GPU (gpu/) everything is queued, and the device itself keeps the order.
"""

from __future__ import annotations

from connectors.copies.host import Device, HostDevice, LayerCache
from kvstore.core.errors import NotSupported


def device_of(caches: dict[str, LayerCache]) -> Device:
    """Return the device that KV tensors are on; a rank may have none.

    Raises NotSupported for one that is not served, for tensors on several, and where a package
    is missing that the device needs.
    """
    names = sorted({str(cache.storage.device) for cache in caches.values()}) or ["cpu"]
    if len(names) != 1:
        raise NotSupported(f"KV tensors are on {names}, expected one device")
    kind = names[0].partition(":")[0]
    if kind == "cpu":
        return HostDevice(caches)
    if kind == "cuda":
        from connectors.copies.gpu.device import CudaDevice  # noqa: PLC0415 - it loads cupy

        return CudaDevice(caches)
    raise NotSupported(f"KV tensors are on {names[0]}, served are ['cpu', 'cuda']")
