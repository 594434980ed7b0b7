"""The bench of the row mover: its cases say what they move, and a wrong move is not timed."""

import pytest
import torch

from treemla.gate import moves, schema
from treemla.gate.exits import Exit


@pytest.mark.parametrize("case", moves.CASES, ids=lambda case: case.id)
def test_slots_are_those_of_the_case(case: moves.MoveCase) -> None:
    source, destination = case.slots()
    assert len(source) == len(destination) == case.moves
    assert (
        len(set(destination.tolist())) == case.moves and max(*source.tolist(), *destination.tolist()) < 4 * case.moves
    )
    both = set(source.tolist()) & set(destination.tolist())
    assert bool(both) == case.accepted


def test_ids_are_unique() -> None:
    assert len({case.id for case in moves.CASES}) == len(moves.CASES)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """The bench without its GPU: nothing is timed."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "device", lambda *_: "cpu")
    monkeypatch.setattr(moves.measure, "time_layers", lambda layers: [1.0])
    where = schema.Where("H200", None, None, "2", None, None, "abc", "2026-11-29", "bench-moves")
    monkeypatch.setattr(moves.fingerprint, "collect", lambda commit: where)


SMALL = (moves.MoveCase(40, 2, 64), moves.MoveCase(18, 2, 64, accepted=True))


def test_it_writes_three_metrics_a_case(on_a_cpu, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(
        moves, "measure_case", lambda case: {m: [2.0, 4.0, 4.0] for m in ("move_rows", "torch", "copy")}
    )
    assert moves.bench_moves(SMALL, tmp_path / "x.jsonl", None).exit is Exit.PASS
    made = schema.load(tmp_path / "x.jsonl")
    assert [(m.case, m.metric) for m in made] == [(c.id, m) for c in SMALL for m in ("move_rows", "torch", "copy")]
    assert "100%" in capsys.readouterr().out


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_a_case_measures_right_moves(on_a_cpu, case) -> None:
    assert list(moves.measure_case(case)) == ["move_rows", "torch", "copy"]


def test_a_wrong_move_is_not_timed(on_a_cpu, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(moves, "move_rows", lambda *arguments, **options: None)
    assert moves.bench_moves(SMALL, tmp_path / "x.jsonl", None).exit is Exit.FAILED
    assert not (tmp_path / "x.jsonl").exists()
