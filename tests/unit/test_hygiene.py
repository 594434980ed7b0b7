"""One program on a GPU, and what the driver says of it: with nvidia-ml-py's own names, a stand-in's answers."""

import multiprocessing
import sys
import types

import pytest

from treemla.gate import hygiene, nvml
from treemla.gate.exits import InvalidEnvironment

UUID = "GPU-00000000-1111"


class Fake(types.ModuleType):
    """nvidia-ml-py of one GPU, by the names that version 13.615 has. silent: functions that are not supported on it."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    nvmlClocksEventReasonHwSlowdown = 0x8  # noqa: N815
    nvmlClocksEventReasonSwThermalSlowdown = 0x20  # noqa: N815
    nvmlClocksEventReasonHwThermalSlowdown = 0x40  # noqa: N815
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80  # noqa: N815

    class NVMLError(Exception):
        pass

    def __init__(self, *silent, reasons=0, pids=(), mig=0):
        super().__init__("pynvml")
        answers = {
            "nvmlInit": None, "nvmlDeviceGetHandleByUUID": "handle", "nvmlDeviceGetPowerUsage": 412_500,
            "nvmlDeviceGetCurrentClocksEventReasons": reasons, "nvmlDeviceGetTemperature": 55,
            "nvmlDeviceGetClockInfo": 1980, "nvmlDeviceGetMaxClockInfo": 1980, "nvmlDeviceGetVbiosVersion": "96.00",
            "nvmlDeviceGetMigMode": (mig, mig), "nvmlDeviceGetEccMode": (1, 1), "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetComputeRunningProcesses": [types.SimpleNamespace(pid=pid) for pid in pids],
        }  # fmt: skip
        for name, answer in answers.items():
            setattr(self, name, self.unsupported if name in silent else lambda *_, answer=answer: answer)

    def unsupported(self, *_):
        raise self.NVMLError


@pytest.fixture
def gauge(monkeypatch):
    monkeypatch.setattr(hygiene, "SETTLE_S", 0.01)

    def gauge(*silent, **told):
        monkeypatch.setitem(sys.modules, "pynvml", Fake(*silent, **told))
        return nvml.attach(UUID)

    return gauge


def test_a_reading_has_units_and_names_the_slowdowns(gauge):
    assert gauge(reasons=0x48 | 0x4).read() == nvml.Reading(1980, 1980, 55, 412.5, ("HwSlowdown", "HwThermalSlowdown"))


def test_what_a_gpu_does_not_tell_is_none_and_never_zero(gauge):
    silent = [name for name in vars(Fake()) if name.startswith("nvmlDeviceGet") and "Handle" not in name]
    told = gauge(*silent)
    assert told.read() == nvml.Reading(None, None, None, None, ())
    assert told.compute_pids() is None
    assert set(told.facts().values()) == {None}


def test_without_library_or_driver_there_is_no_gauge(gauge, monkeypatch):
    assert gauge("nvmlInit") is None
    assert gauge("nvmlDeviceGetHandleByUUID") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.attach(UUID) is None


def test_another_process_on_the_gpu_is_an_environment(gauge):
    with pytest.raises(InvalidEnvironment, match=r"busy before .*\[77\]"), hygiene.alone(gauge(pids=(77,))):
        pytest.fail("measured")


def test_a_process_that_came_while_measuring_is_noticed(gauge):
    held = gauge()
    with pytest.raises(InvalidEnvironment, match="busy after"), hygiene.alone(held):
        held._nvml.nvmlDeviceGetComputeRunningProcesses = lambda _: [types.SimpleNamespace(pid=78)]


def test_a_process_that_is_just_ending_is_waited_for(gauge):
    held = gauge()
    told = iter([[types.SimpleNamespace(pid=79)]])
    held._nvml.nvmlDeviceGetComputeRunningProcesses = lambda _: next(told, [])
    with hygiene.alone(held):
        pass


def test_an_idle_gpu_and_one_that_does_not_tell_are_measured(gauge):
    for held in (gauge(), gauge("nvmlDeviceGetComputeRunningProcesses"), None):
        with hygiene.alone(held):
            pass


def test_a_slice_of_a_gpu_is_refused(gauge):
    with pytest.raises(InvalidEnvironment, match="MIG"):
        hygiene.expect_whole(gauge(mig=1))
    hygiene.expect_whole(gauge())
    hygiene.expect_whole(gauge("nvmlDeviceGetMigMode"))


def hold(folder, ready, done, how=hygiene.lease):
    with how(UUID, 0.0, folder):
        ready.set()
        done.wait(60)


@pytest.fixture
def held_by_another(tmp_path):
    """Starts a process that holds or shares the GPU until it is killed."""
    fork, started = multiprocessing.get_context("fork"), []

    def held_by_another(how):
        ready = fork.Event()
        started.append(fork.Process(target=hold, args=(tmp_path, ready, fork.Event(), how)))
        started[-1].start()
        assert ready.wait(60)
        return started[-1]

    yield held_by_another
    for process in started:
        process.kill()
        process.join()


def test_suites_share_a_gpu_with_each_other_and_with_no_measurement(held_by_another, tmp_path):
    suite = held_by_another(hygiene.share)
    with hygiene.share(UUID, 0.0, tmp_path):
        pass
    with pytest.raises(InvalidEnvironment, match="held by a test suite"), hygiene.lease(UUID, 0.0, tmp_path):
        pytest.fail("measured beside a suite")
    suite.kill()
    with hygiene.lease(UUID, 60.0, tmp_path), hygiene.share("GPU-another", 0.0, tmp_path):
        pass
    held_by_another(hygiene.lease)
    with pytest.raises(InvalidEnvironment, match="measured on"), hygiene.share(UUID, 0.0, tmp_path):
        pytest.fail("ran beside a measurement")


def test_a_gpu_is_waited_for_until_it_is_neither_held_nor_busy(gauge, held_by_another, tmp_path):
    hygiene.wait_until_free(UUID, gauge(), 0.0, tmp_path)
    with pytest.raises(InvalidEnvironment, match=r"busy for longer than 0 s: processes \[77\]"):
        hygiene.wait_until_free(UUID, gauge(pids=(77,)), 0.0, tmp_path)
    ending, told = gauge(), iter([[types.SimpleNamespace(pid=79)]])
    ending._nvml.nvmlDeviceGetComputeRunningProcesses = lambda _: next(told, [])
    hygiene.wait_until_free(UUID, ending, 60.0, tmp_path)
    other = held_by_another(hygiene.share)
    with pytest.raises(InvalidEnvironment, match="held by a test suite"):
        hygiene.wait_until_free(UUID, gauge(), 0.0, tmp_path)
    other.kill()
    hygiene.wait_until_free(UUID, gauge(), 60.0, tmp_path)


def test_a_gpu_is_held_by_one_process_and_the_next_is_told_which(tmp_path):
    spawn = multiprocessing.get_context("fork")
    ready, done = spawn.Event(), spawn.Event()
    other = spawn.Process(target=hold, args=(tmp_path, ready, done))
    other.start()
    assert ready.wait(60)
    with pytest.raises(InvalidEnvironment, match=f'"pid": {other.pid}'), hygiene.lease(UUID, 0.1, tmp_path):
        pytest.fail("held twice")
    with hygiene.lease("GPU-another", 0.0, tmp_path):
        pass
    other.kill()
    other.join()
    with hygiene.lease(UUID, 1.0, tmp_path):  # it ended without giving it back
        pass


def test_a_lease_ends_with_what_it_was_for(tmp_path):
    with pytest.raises(RuntimeError, match="inside"), hygiene.lease(UUID, 0.0, tmp_path):
        raise RuntimeError("inside")
    with hygiene.lease(UUID, 0.0, tmp_path):
        pass
