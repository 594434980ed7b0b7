"""A process of its own for one object: its methods are asked for over a pipe, and its crash is an answer too."""

import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# CUDA does not survive a fork. The server that forks has imported torch, which takes seconds, and never used it: each
# process of its children still has a sys.path, a treemla and a CUDA context of its own.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch"])
TIMEOUT_S = 120.0


class WorkerFailed(RuntimeError):
    """What was asked raised an exception, ended the process or took longer than TIMEOUT_S."""


class Worker:
    """Calls `make(*arguments)` in a new process; `ask` calls a method of what it returned.

    Use it as: `send`, at once for several workers if they may work side by side, then `answer` of each. The first
    answer is `make`'s: None, or WorkerFailed. source: a folder that the process imports from before any other, `make`
    too.
    """

    def __init__(self, make: Callable[..., object], *arguments: object, source: Path | None = None) -> None:
        self._pipe, theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        with _importing_from(source):
            self._process.start()
        theirs.close()

    def send(self, method: str, *arguments: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # its process ended; `answer` says how
            self._pipe.send((method, arguments))

    def answer(self, timeout_s: float = TIMEOUT_S) -> Any:
        """What the last method returned. WorkerFailed where there is no such answer."""
        if not self._pipe.poll(timeout_s):
            self.stop()
            raise WorkerFailed(f"no answer in {timeout_s:.0f} s")
        try:
            worked, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise WorkerFailed(f"its process ended with exit code {self._process.exitcode}") from None
        if not worked:
            raise WorkerFailed(value)
        return value

    def ask(self, method: str, *arguments: object) -> Any:
        self.send(method, *arguments)
        return self.answer()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def stop(self) -> None:
        """End the process; it holds nothing that needs an orderly end."""
        self._process.kill()
        self._process.join()


@contextlib.contextmanager
def _importing_from(source: Path | None) -> Iterator[None]:
    """A process that is started takes over sys.path before it imports anything."""
    before = sys.path[:]
    if source is not None:
        sys.path.insert(0, str(source))
    try:
        yield
    finally:
        sys.path[:] = before


def _serve(pipe: Connection, make: Callable[..., object], arguments: tuple[object, ...]) -> None:
    try:
        held = make(*arguments)
        pipe.send((True, None))
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))
        return
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return  # the parent is gone
        try:
            pipe.send((True, getattr(held, method)(*arguments)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))
