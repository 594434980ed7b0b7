"""Tables, the roofline behind them, and the picture."""

import pytest

from treemla.gate import plot, roofline, schema
from treemla.gate.cases import CASES, VerifyCase
from treemla.gate.report import table

WHERE = schema.Where("NVIDIA H200", "580.1", "13.0", "2.11.0", None, None, "0" * 40, "2026-01-02T03:04:05Z", "-")


def test_numbers_align_right_and_words_left():
    assert table(["name", "us"], [["a", 5], ["bc", 12.5]]) == "name    us\n----  ----\na        5\nbc    12.5"


def test_a_missing_figure_leaves_its_column_numeric():
    assert table(["us"], [["10.5x"], ["-"]]).splitlines() == ["   us", "-----", "10.5x", "    -"]


@pytest.mark.parametrize(
    ("context", "batch", "tree_tokens", "heads", "floor_us"),
    [(65536, 1, 9, 8, 16.9), (65536, 1, 32, 8, 46.2), (16384, 8, 9, 64, 208.0), (4096, 1, 9, 8, 1.1)],
)
def test_the_floor_is_bandwidth_or_arithmetic_whichever_takes_longer(context, batch, tree_tokens, heads, floor_us):
    """Figures worked out by hand from 4.5 TB/s and 790 TFLOPS."""
    case = VerifyCase((context,) * batch, tree_tokens, heads)
    assert roofline.floor_us(case, roofline.CEILINGS["H200"]) == pytest.approx(floor_us, rel=0.02)


@pytest.mark.parametrize(("tree_tokens", "floor_us"), [(1, 16.9), (9, 26.0)])
def test_fp8_rows_halve_the_bandwidth_bound_and_not_the_arithmetic(tree_tokens, floor_us):
    case = VerifyCase((16384,) * 8, tree_tokens, 8, fp8_kv=True)
    assert case.id == f"verify-b8-c16384-t{tree_tokens}-h8-p1-bf16-fp8"
    assert roofline.floor_us(case, roofline.CEILINGS["H200"]) == pytest.approx(floor_us, rel=0.02)


def test_a_floor_adds_up_over_the_requests_of_a_batch():
    ceiling = roofline.CEILINGS["RTX PRO 6000"]
    alone = [roofline.floor_us(VerifyCase((n,), 9, 8), ceiling) for n in (512, 4096)]
    assert roofline.floor_us(VerifyCase((512, 4096), 9, 8), ceiling) == pytest.approx(sum(alone))


def test_an_unknown_gpu_has_no_floor():
    assert roofline.floors_us("NVIDIA GeForce GT 1030") == {}


def test_the_table_says_how_many_times_faster_and_how_near_to_the_roofline():
    from treemla.gate.bench import show

    def taken(metric, us):
        return schema.Measurement.of(CASES[4].id, metric, "us", [us], WHERE)

    row = show([taken("verify", 50.0), taken("plan", 4.0), taken("triton", 10_000.0)]).splitlines()[-1].split()
    assert row == [CASES[4].id, "50.0", "0.00", "4.0", "10000.0", "200.0x", "16.9", "34%"]
    assert show([taken("verify", 50.0), taken("plan", 4.0)]).splitlines()[-1].split()[4:6] == ["-", "-"]


def test_without_matplotlib_the_picture_is_left_out_and_said_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    plot.draw_if_possible(plot.draw_bars, [], tmp_path / "a.svg")
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
