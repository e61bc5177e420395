"""The wedge probe, run as a program: does the CUDA driver still give out, fill and free memory on one card?

Needs the standard library and ``libcuda`` alone, so that it runs in any Python, with or without a venv. Reads one JSON
request on stdin: ``{"pci": "0000:82:00.0", "library": "libcuda.so.1", "sizes": [bytes, …]}``. Writes JSON lines:
``{"event": "step", …}`` after each step, at last ``{"event": "done"}`` or ``{"event": "failure", "call": …, …}``.
"""

import ctypes
import json
import sys
import time
from typing import Any

_OUT_OF_MEMORY = 2
_SPARE_BYTES = 256 << 20


class DriverError(Exception):
    """A driver call gave an error code."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call = call
        self.code = code
        self.name = name


def main() -> int:
    request = json.loads(sys.stdin.readline())
    try:
        cuda = ctypes.CDLL(request["library"])
    except OSError as error:
        _say(event="failure", call="dlopen", code=-1, name=str(error))
        return 1
    try:
        _probe(cuda, request["pci"], request["sizes"])
    except DriverError as error:
        _say(event="failure", call=error.call, code=error.code, name=error.name)
        return 1
    _say(event="done")
    return 0


def _probe(cuda: Any, pci: str, sizes: list[int]) -> None:
    device = ctypes.c_int()
    context = ctypes.c_void_p()
    _say(event="step", step="start")
    _call(cuda, "cuInit", ctypes.c_uint(0))
    _call(cuda, "cuDeviceGetByPCIBusId", ctypes.byref(device), pci.encode())
    _call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call(cuda, "cuCtxSetCurrent", context)
    _say(event="step", step="context")
    for size in sizes:
        _touch(cuda, size)
    _call(cuda, "cuDevicePrimaryCtxRelease_v2", device)


def _touch(cuda: Any, size: int) -> None:
    """Allocate ``size`` bytes, write each, wait, free, wait. Skipped where that much is not free: that is no fault."""
    started = time.monotonic()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call(cuda, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    if free.value < size + _SPARE_BYTES:
        _say(event="step", step="skip", bytes=size, free=free.value)
        return
    address = ctypes.c_uint64()
    try:
        _call(cuda, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    except DriverError as error:
        if error.code != _OUT_OF_MEMORY:
            raise
        _say(event="step", step="skip", bytes=size, free=free.value)
        return
    _call(cuda, "cuMemsetD8_v2", address, ctypes.c_ubyte(0x5A), ctypes.c_size_t(size))
    _call(cuda, "cuCtxSynchronize")
    _call(cuda, "cuMemFree_v2", address)
    _call(cuda, "cuCtxSynchronize")
    _say(event="step", step="allocate", bytes=size, seconds=round(time.monotonic() - started, 4))


def _call(cuda: Any, name: str, *arguments: Any) -> None:
    code = getattr(cuda, name)(*arguments)
    if code != 0:
        raise DriverError(name, code, _name_error(cuda, code))


def _name_error(cuda: Any, code: int) -> str:
    text = ctypes.c_char_p()
    if cuda.cuGetErrorName(code, ctypes.byref(text)) != 0 or text.value is None:
        return "unknown error"
    return text.value.decode("ascii", "replace")


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)  # noqa: T201 - stdout is this program's answer


if __name__ == "__main__":
    sys.exit(main())
