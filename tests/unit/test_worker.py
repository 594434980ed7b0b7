"""A process of its own: what it answers, and that no way for it to end looks like an answer."""

import importlib
import os
import sys
import time

import pytest

from treemla.gate.worker import Worker, WorkerFailed


@pytest.fixture
def start():
    started = []

    def start(make, *arguments):
        started.append(Worker(make, *arguments))
        return started[-1]

    yield start
    for worker in started:
        worker.stop()


def test_it_keeps_what_it_made_and_answers_in_order(start):
    worker = start(list, [3, 1])
    worker.send("append", 2)
    worker.send("index", 2)
    assert [worker.answer() for _ in range(3)] == [None, None, 2]


def test_it_runs_in_another_process(start):
    worker = start(__import__, "os")
    worker.answer()
    assert worker.ask("getpid") != os.getpid()


def test_what_cannot_be_made_says_why(start):
    with pytest.raises(WorkerFailed, match="ModuleNotFoundError: No module named 'no_such_peer'"):
        start(__import__, "no_such_peer").answer()


def test_an_exception_is_no_end(start):
    worker = start(list, [3])
    worker.answer()
    with pytest.raises(WorkerFailed, match=r"ValueError: .*not in list"):
        worker.ask("index", 7)
    assert worker.alive and worker.ask("index", 3) == 0


def test_a_crash_is_told_from_an_answer(start):
    worker = start(os.abort)
    with pytest.raises(WorkerFailed, match="exit code -6"):
        worker.answer()
    worker.send("anything")
    with pytest.raises(WorkerFailed):
        worker.answer()
    assert not worker.alive


def test_a_hang_ends_with_its_process(start):
    worker = start(time.sleep, 600)
    with pytest.raises(WorkerFailed, match="no answer in 0 s"):
        worker.answer(timeout_s=0.2)
    assert not worker.alive


def test_it_imports_from_the_source_that_it_is_given(start, tmp_path):
    (tmp_path / "only_there.py").write_text("def make(): return [__file__]\n")
    worker = Worker(import_and_make, "only_there", source=tmp_path)
    worker.answer()
    assert worker.ask("index", str(tmp_path / "only_there.py")) == 0
    worker.stop()
    assert str(tmp_path) not in sys.path


def import_and_make(name):
    return importlib.import_module(name).make()
