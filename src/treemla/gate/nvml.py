"""What the driver says about a GPU: clocks, temperature, power, slowdowns, processes. Needs nvidia-ml-py.

A figure that a GPU does not give ("N/A", not supported) is None, never a text and never 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SLOWDOWNS = ("HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")  # of a GPU in trouble
REMEDY = "pip install nvidia-ml-py, to watch clocks and foreign processes"


@dataclass(frozen=True)
class Reading:
    """One moment. slowdowns: those of SLOWDOWNS in force; a power cap is none, it is how a full load looks."""

    sm_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    slowdowns: tuple[str, ...]


def attach(uuid: str) -> "Gauge | None":
    """The gauge of the GPU with this UUID ("GPU-..."); None without nvidia-ml-py or a driver that answers."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return Gauge(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError:
        return None


class Gauge:
    """Asks NVML about one GPU; cheap enough to ask around every block of a measurement."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def read(self) -> Reading:
        nvml, handle = self._nvml, self._handle
        milliwatts = self._asked(nvml.nvmlDeviceGetPowerUsage, handle)
        reasons = self._asked(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
        return Reading(
            sm_mhz=self._asked(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_mhz=self._asked(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            temperature_c=self._asked(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if milliwatts is None else milliwatts / 1000,
            slowdowns=tuple(name for name in SLOWDOWNS if reasons & getattr(nvml, f"nvmlClocksEventReason{name}")),
        )

    def compute_pids(self) -> list[int] | None:
        """Processes that hold a CUDA context on the GPU; None where the driver does not say.

        A container sees ids of another namespace, or none, so ids say how many there are, not whose they are.
        """
        found = self._asked(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handle)
        return None if found is None else [process.pid for process in found]

    def facts(self) -> dict[str, int | str | None]:
        """What a GPU of the same name may differ in, with an effect on time."""
        nvml, handle = self._nvml, self._handle
        mig, ecc = self._asked(nvml.nvmlDeviceGetMigMode, handle), self._asked(nvml.nvmlDeviceGetEccMode, handle)
        return {
            "power_limit_mw": self._asked(nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
            "max_sm_mhz": self._asked(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            "max_memory_mhz": self._asked(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM),
            "vbios": self._asked(nvml.nvmlDeviceGetVbiosVersion, handle),
            "mig": None if mig is None else mig[0],
            "ecc": None if ecc is None else ecc[0],
        }

    def _asked(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except self._nvml.NVMLError:
            return None
