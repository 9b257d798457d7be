"""How busy the node's NVIDIA devices are, by NVIDIA's management library (NVML), where a driver brought one.

Through ctypes: no package is needed, and nothing of CUDA is initialised. A call that fails leaves -1: a device that
fell off the bus must not end whoever looks. Not run on a GPU yet; tests use a small library with the same functions.
"""

from __future__ import annotations

import ctypes

from everstep.core.load import DeviceLoad

LIBRARY = "libnvidia-ml.so.1"
MB = 10**6
_TEMPERATURE_GPU = 0


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Devices:
    """`visible`: what CUDA_VISIBLE_DEVICES says, None: all. Numbers and UUIDs, as CUDA reads them: up to the first
    that is no device. NVML counts by place on the bus, as CUDA does where all devices are of one kind."""

    def __init__(self, visible: str | None = None, library: str = LIBRARY) -> None:
        self._handles: list[ctypes.c_void_p] = []
        try:
            self._nvml = ctypes.CDLL(library)
        except OSError:  # no driver
            return
        if self._nvml.nvmlInit_v2() == 0:
            self._handles = self._all() if visible is None else self._named(visible)

    def _all(self) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        if self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        return [handle for k in range(count.value) if (handle := self._handle(str(k)))]

    def _named(self, visible: str) -> list[ctypes.c_void_p]:
        handles = []
        for name in visible.split(","):
            handle = self._handle(name.strip())
            if handle is None:
                break
            handles.append(handle)
        return handles

    def _handle(self, name: str) -> ctypes.c_void_p | None:
        handle = ctypes.c_void_p()
        if name.isdigit():
            failed = self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            failed = self._nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        return None if failed else handle

    def memory_mb(self) -> int:
        """Of one: they are of one kind."""
        memory = _Memory()
        failed = not self._handles or self._nvml.nvmlDeviceGetMemoryInfo(self._handles[0], ctypes.byref(memory))
        return 0 if failed else memory.total // MB

    def sample(self) -> tuple[DeviceLoad, ...]:
        """One for each device, in order."""
        return tuple(self._load(handle) for handle in self._handles)

    def _load(self, handle: ctypes.c_void_p) -> DeviceLoad:
        busy, memory, celsius = _Utilization(), _Memory(), ctypes.c_uint()
        no_busy = self._nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(busy))
        no_memory = self._nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        no_celsius = self._nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU, ctypes.byref(celsius))
        return DeviceLoad(
            -1 if no_busy else busy.gpu,
            -1 if no_memory or not memory.total else round(100 * memory.used / memory.total),
            -1 if no_celsius else celsius.value,
        )
