"""The driver's end of engine.py: a process with a deadline on every answer."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

LOG_LINES = 40


class EngineFailed(RuntimeError):
    """An engine did not start, died, or did not answer in time; the message ends with its log."""


class Child:
    """One Engine. Use as a context manager: whatever happens, its processes end."""

    def __init__(self, folder: Path, port: int, model: str, run: str, backend: str, fault: str | None = None) -> None:
        self.folder, self.name = folder, "-".join(filter(None, [model, run, backend, fault]))
        arguments = {"model": model, "run": run, "backend": backend, "folder": str(folder), "port": str(port)}
        arguments |= {"fault": fault} if fault else {}
        command = [sys.executable, str(Path(__file__).with_name("engine.py"))]
        command += [f"--{name}={value}" for name, value in arguments.items()]
        folder.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.replies: queue.Queue[str | None] = queue.Queue()
        self.failed = False
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None and not self.failed:
            try:
                self.ask({"do": "stop"}, 60)
            except EngineFailed as error:
                print(f"{self.name}: {error}", flush=True)
        self._end()

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        return self._reply(timeout_s)

    def ask(self, command: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a command and return its answer. Raises EngineFailed."""
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise self._failed(f"is gone: {error}") from error
        return self._reply(timeout_s)

    def _read(self) -> None:
        for line in self.process.stdout:
            self.replies.put(line)
        self.replies.put(None)

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        begin = time.monotonic()
        try:
            line = self.replies.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failed(f"no answer in {timeout_s} s") from None
        if line is None:
            raise self._failed(f"ended with code {self.process.wait(10)}")
        made = json.loads(line)
        if "error" in made:
            raise self._failed(made["error"])
        return made | {"took_s": time.monotonic() - begin}

    def _failed(self, what: str) -> EngineFailed:
        self.failed = True
        log = self.folder / "log.txt"
        tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        return EngineFailed("\n".join([f"{self.name}: {what}", *(f"  | {line[:300]}" for line in tail)]))

    def _end(self) -> None:
        """The process and what it started: they are a session of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
