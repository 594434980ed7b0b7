"""In the place of processes on a GPU: sides whose times are made up, on a machine that drifts and is noisy."""

import math
import random

from treemla.gate import gating, nvml, schema
from treemla.gate.side import Block
from treemla.gate.worker import WorkerFailed

FINGERPRINT = "0123456789ab"
WHERE = schema.Where(
    "NVIDIA H200", "580.1", "13.0", "2.11.0", "3.6.0", "0.5.16", "f" * 40, "2026-01-02T03:04:05Z", "-",
    fingerprint=FINGERPRINT, arch="sm_90", start="aaaaaaaaaaaa",
)  # fmt: skip
HERE = gating.Here(WHERE)
COOL = nvml.Reading(1980, 3201, 50, 400.0, ())


class Machine:
    """us: {side: true microseconds}. spread: of processes; jitter: of replays; drift: slower with every block.

    readings: what the driver says around each block, in turns. faults: {side: (method, what it answers or raises)}.
    """

    def __init__(self, us, *, spread=0.005, jitter=0.01, drift=0.0, readings=(COOL,), faults=None, seed=0):
        self.us, self.spread, self.jitter, self.drift = us, spread, jitter, drift
        self.readings, self.faults = readings, faults or {}
        self.noise, self.clock, self.started = random.Random(seed), 0, []

    def start(self, side):
        self.started.append(side)
        return Side(self, side)


class Side:
    def __init__(self, machine, side):
        self.machine, self.side = machine, side
        self.level = machine.us[side] * math.exp(machine.noise.gauss(0, machine.spread))
        self.pending, self.stopped = [("make", ())], False

    def send(self, method, *arguments):
        self.pending.append((method, arguments))

    def answer(self):
        method, arguments = self.pending.pop(0)
        failing, told = self.machine.faults.get(self.side, (None, None))
        if failing == method:
            if isinstance(told, Exception):
                raise told
            return told
        return getattr(self, f"do_{method}")(*arguments)

    def ask(self, method, *arguments):
        self.send(method, *arguments)
        return self.answer()

    def stop(self):
        self.stopped = True

    def do_make(self):
        return None

    def do_prepare(self, _):
        return ""

    def do_block(self, replays, _):
        machine = self.machine
        machine.clock += 1
        level = self.level * (1 + machine.drift * machine.clock)
        reading = machine.readings[machine.clock % len(machine.readings)]
        samples = tuple(level * math.exp(machine.noise.gauss(0, machine.jitter)) for _ in range(replays))
        return Block(samples, (reading, reading))


CRASH = WorkerFailed("its process ended with exit code -11")
