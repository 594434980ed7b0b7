"""Launches one kernel of a cubin compiled from faults.cu: `python faults.py CUBIN KERNEL`. No torch: it starts fast.

What the driver says after the launch is ignored: the tool that watches ends the context of a kernel it faults.
"""

import ctypes
import sys

from cuda.bindings import driver

THREADS, BUFFER_BYTES = 64, 128 * 4


def _done(answer: tuple[object, ...]) -> object:
    error, *values = answer
    if error != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"faults.py: {error}")
    return values[0] if values else None


def main(cubin: str, kernel: str) -> None:
    _done(driver.cuInit(0))
    context = _done(driver.cuDevicePrimaryCtxRetain(_done(driver.cuDeviceGet(0))))
    _done(driver.cuCtxSetCurrent(context))
    module = _done(driver.cuModuleLoad(cubin.encode()))
    function = _done(driver.cuModuleGetFunction(module, kernel.encode()))
    buffer = _done(driver.cuMemAlloc(BUFFER_BYTES))
    arguments = ((int(buffer),), (ctypes.c_void_p,))
    driver.cuLaunchKernel(function, 1, 1, 1, THREADS, 1, 1, 0, 0, arguments, 0)
    driver.cuCtxSynchronize()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
