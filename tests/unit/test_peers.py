"""The peers layer from fabricated times: what is asked of whom, in which order, and what table and picture say."""

import itertools
from dataclasses import replace

import pytest

from treemla.gate import peers_bench, plot, roofline, schema
from treemla.gate.cases import PEER_CASES
from treemla.gate.exits import Exit
from treemla.gate.peers import BY_METRIC, OURS, PEERS
from treemla.gate.worker import WorkerFailed

WHERE = schema.Where("NVIDIA H200", "580.1", "13.0", "2.11.0", None, None, "0" * 40, "2026-01-02T03:04:05Z", "-")
ROW, SINGLE, PAGED = PEER_CASES[0], PEER_CASES[3], PEER_CASES[-1]


class Stub:
    """In the place of a peer's process: 10 us a layer. faults: {method: what it answers or raises instead}.

    Making it is the first thing that it answers for.
    """

    log: list

    def __init__(self, metric, **faults):
        self.metric, self.faults, self.alive = metric, faults, True
        self.pending = [("make", ())]

    def send(self, method, *arguments):
        self.pending.append((method, arguments))

    def answer(self):
        method, arguments = self.pending.pop(0)
        self.log.append((self.metric, method, *arguments))
        told = self.faults.get(method)
        if isinstance(told, Exception):
            self.alive = method == "prepare"
            raise told
        if told is not None:
            return told
        return [10.0] * arguments[0] if method == "time" else "" if method == "prepare" else None

    def ask(self, method, *arguments):
        self.send(method, *arguments)
        return self.answer()

    def stop(self):
        self.alive = False


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the layer with a Stub a peer; gives (findings, {(metric, case): value}, log of calls)."""

    def run(rows, **stubs):
        monkeypatch.setattr(Stub, "log", [], raising=False)
        made = {peer.metric: stubs.get(peer.metric, {}) for peer in PEERS}
        monkeypatch.setattr(peers_bench, "Worker", lambda _, metric: Stub(metric, **made[metric]))
        monkeypatch.setattr(peers_bench.fingerprint, "collect", lambda _: WHERE)
        out = tmp_path / "a.jsonl"
        found = peers_bench.bench_peers(rows, out, "abc")
        measured = {(m.metric, m.case): m.value for m in schema.load(out)} if out.exists() else {}
        return found, measured, Stub.log

    return run


def test_every_peer_is_measured_on_the_rows_it_takes(run):
    found, measured, _ = run([ROW, SINGLE])
    assert found.exit is Exit.PASS and len(found.found) == len(measured)
    paged = replace(ROW, page_size=64).id
    trees = {"verify", "triton", "triton_eager", "flashinfer_fa2", "flashinfer_fa3"}
    assert {metric for metric, case in measured if case == ROW.id} == trees
    assert {metric for metric, case in measured if case == paged} == {"flashmla"}
    assert {metric for metric, case in measured if case == SINGLE.id} == trees - {"triton", "triton_eager"} | {
        "triton_decode"
    }


def test_blocks_alternate_and_all_are_prepared_before_the_first(run):
    _, _, log = run([ROW])
    calls = [(metric, method) for metric, method, *_ in log if method in ("prepare", "time")]
    count = calls.index(("verify", "time"))
    assert all(method == "prepare" for _, method in calls[:count])
    timed = [metric for metric, _ in calls[count:]]
    blocks = [tuple(timed[i : i + count]) for i in range(0, len(timed), count)]
    assert len(blocks) == peers_bench.BLOCKS
    assert blocks[1] == blocks[0][::-1] != blocks[0]
    assert all(later == earlier for earlier, later in zip(blocks, blocks[2:], strict=False))


def test_what_two_rows_share_is_measured_once(run):
    rows = [replace(PAGED, page_size=1), PAGED]
    _, measured, log = run(rows)
    assert [call[1:] for call in log if call[0] == "flashmla" and call[1] == "prepare"] == [("prepare", PAGED)]
    made = [schema.Measurement.of(case, metric, "us", [us], WHERE) for (metric, case), us in measured.items()]
    shown = peers_bench.figures(made, rows)[BY_METRIC["flashmla"].heading]
    assert set(shown) == {row.id for row in rows}  # and stands in both


def test_a_peer_that_is_not_there_is_named_and_no_failure(run, capsys):
    found, measured, log = run(
        [ROW], flashmla={"make": WorkerFailed("ModuleNotFoundError: No module named 'sgl_kernel'")}
    )
    assert found.exit is Exit.PASS
    assert "flashmla" not in {metric for metric, _ in measured}
    assert [call for call in log if call[0] == "flashmla"] == [("flashmla", "make")]
    assert "no page size 1) is not measured: ModuleNotFoundError" in capsys.readouterr().out


@pytest.mark.parametrize(
    "fault",
    [
        {"prepare": "relative error 1e-1"},
        {"prepare": WorkerFailed("no answer")},
        {"time": WorkerFailed("its process ended with exit code -11")},
    ],
    ids=["wrong", "refuses", "crashes"],
)
@pytest.mark.parametrize("metric", ["verify", "flashinfer_fa3"])
def test_what_is_wrong_or_breaks_is_left_out_and_fails_the_run(run, metric, fault):
    found, measured, _ = run([ROW], **{metric: fault})
    assert found.exit is Exit.FAILED
    assert metric not in {metric for metric, _ in measured}
    assert ("triton", ROW.id) in measured
    assert f"FAILED: peers: {metric}" in found.problems()


@pytest.mark.parametrize(("fails_in", "asked"), [("prepare", 2), ("time", 1)])
def test_a_peer_that_refused_a_row_is_asked_the_next_one_and_a_peer_that_ended_is_not(run, fails_in, asked):
    _, _, log = run([ROW, SINGLE], flashinfer_fa2={fails_in: WorkerFailed("why")})
    assert [call[:2] for call in log].count(("flashinfer_fa2", "prepare")) == asked


def test_nothing_measured_is_no_pass(run):
    absent = {"make": WorkerFailed("ImportError")}
    found, measured, _ = run([ROW], **{peer.metric: absent for peer in PEERS})
    assert (found.exit, measured) == (Exit.FAILED, {})


def fabricated(rows=PEER_CASES):
    """Measurements of every peer on every row it takes: OURS 10 us, the next 20 us, and so on."""
    taken = [(peer, case, 10.0 * i) for i, peer in enumerate(PEERS, 1) for row in rows if (case := peer.case(row))]
    return [schema.Measurement.of(case.id, peer.metric, "us", [us], WHERE) for peer, case, us in dict.fromkeys(taken)]


def test_the_table_puts_what_a_peer_lacks_beside_its_figures():
    header, _, first, *_ = peers_bench.show(fabricated(), PEER_CASES).splitlines()
    for peer in PEERS:
        assert peer.heading in header and all(lack in peer.heading for lack in peer.lacks)
    assert BY_METRIC["flashmla"].lacks == ("no tree mask", "no page size 1")
    assert BY_METRIC["flashinfer_fa3"].lacks == ("no tree mask",)
    assert first.split() == [ROW.id, "10.0", "20.0", "30.0", "-", "50.0", "60.0", "70.0", "1.1", "11%"]


def test_rows_of_the_picture_differ_in_context_alone():
    rows = plot.same_but_context(PEER_CASES)
    assert [row.contexts for row in rows] == [(4096,), (16384,), (65536,)]
    assert {(row.batch, row.tree_tokens, row.heads, row.page_size) for row in rows} == {(1, 9, 8, 1)}


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "an unknown GPU"])
def test_the_picture_is_drawn_as_png_and_svg_from_any_set_of_rows(tmp_path, gpu):
    for i, rows in enumerate([PEER_CASES, [SINGLE], [PAGED, ROW]]):
        figures = peers_bench.figures(fabricated(rows), rows)
        paths = [tmp_path / f"{i}{suffix}" for suffix in (".png", ".svg")]
        plot.draw_peers(figures, roofline.floors_us(gpu, rows), rows, replace(WHERE, gpu=gpu), paths)
        assert paths[0].read_bytes().startswith(b"\x89PNG") and "<svg" in paths[1].read_text()


def test_each_peer_has_a_line_and_a_share_of_its_own(tmp_path, monkeypatch):
    """Read back from the axes: times against context on the left, percent of the roofline on the right."""
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    floors = roofline.floors_us(WHERE.gpu, PEER_CASES)
    plot.draw_peers(peers_bench.figures(fabricated(), PEER_CASES), floors, PEER_CASES, WHERE, [tmp_path / "a.png"])
    left, right = drawn[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in left.lines}
    assert set(lines) == {peer.heading for peer in PEERS} | {plot.FLOOR}
    assert lines[OURS.heading] == [[4096, 10], [16384, 10], [65536, 10]]
    assert lines[BY_METRIC["flashmla"].heading] == [[4096, 70], [16384, 70], [65536, 70]]
    shares = {line.get_label(): line.get_xdata().tolist() for line in right.lines}
    assert shares[OURS.heading] == pytest.approx([10 * floors[row.id] for row in PEER_CASES])
    colours = [(a.get_color(), b.get_color()) for a, b in itertools.zip_longest(left.lines[:-1], right.lines)]
    assert len({a for a, _ in colours}) == len(PEERS) and all(a == b for a, b in colours)


def test_a_measurement_names_the_library_that_was_timed(run, tmp_path):
    run([ROW], flashmla={"version": "sglang-kernel 0.4.5"})
    by_metric = {m.metric: m.where.peer for m in schema.load(tmp_path / "a.jsonl")}
    assert by_metric["flashmla"] == "sglang-kernel 0.4.5" and by_metric["verify"] is None
