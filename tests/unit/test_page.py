"""The page for people: everything that was measured is on it, nothing in it is more than text, and it loads nothing."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import sample_report
from sample_report import CASES, HOSTILE, WHERE

from treemla.gate import cli, markup, merge, page, schema, times
from treemla.gate.cases import case_of
from treemla.gate.exits import Exit
from treemla.gate.findings import Finding, Findings
from treemla.gate.markup import plain

TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "p", "ul", "li", "pre", "div", "span", "table",
    "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "svg", "g", "path", "line", "text",
}  # fmt: skip
MEASURED = sorted((sample_report.CHECKOUT / "docs/measured").glob("*.jsonl"))


class Held(HTMLParser):
    """Tags, attributes and text of a document; an end tag that closes nothing is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text, self.by_tag = [], set(), [], "", {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data
            self.by_tag.setdefault(self.open[-1], []).append(data)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    path = tmp_path_factory.mktemp("sample") / "report.html"
    sample_report.make_page(path, HOSTILE)
    return path.read_text()


def made_of(tmp_path, *findings, runs=()):
    for found in findings:
        found.write(tmp_path / f"{found.title}.json", None, None)
    sources = [tmp_path / f"{found.title}.json" for found in findings]
    if runs:
        schema.dump(tmp_path / "runs.jsonl", runs)
        sources.append(tmp_path / "runs.jsonl")
    return page.page(merge.merge(sources, {}), page.gather(sources, tmp_path))


def test_the_verdict_comes_first_and_what_is_wrong_before_what_is_not(sample):
    held = Held(sample)
    first = held.text[held.text.index("report: FAILED") :]
    assert held.text.strip().startswith("report: FAILED")  # the title
    assert first.index("+8.1% beside the base") < first.index("Times on NVIDIA H200") < first.index("History")


def test_hostile_names_and_texts_are_text(sample):
    held = Held(sample)
    assert held.tags <= TAGS
    assert held.text.count(plain(HOSTILE)) >= 4
    assert not [name for name, _ in held.attributes if name.startswith("on") or name in {"src", "href", "style"}]


@pytest.mark.parametrize("text", [HOSTILE, "\x00\x1b[31m", "a" * 5000, "</style>", "<!--", "]]>", "&lt;", ""])
def test_any_text_may_stand_anywhere(tmp_path, text):
    findings = Findings("gate", (Finding(text, text, Exit.FAILED, text, {text: text}),), (text, f"{text}\n{text}"))
    where = replace(WHERE, gpu=text, treemla=text, command=text, date=text, fingerprint=text)
    runs = [
        schema.Measurement.of(case, metric, unit, [9.0], where)
        for case in (text, CASES[0])
        for metric in (text, "verify")
        for unit in (text, "us")
    ]
    held = Held(made_of(tmp_path, findings, runs=[*runs, *runs, *runs]))
    assert held.tags <= TAGS and plain(text) in held.text
    (tmp_path / "out.html").write_text(made_of(tmp_path, findings), encoding="utf-8")


@pytest.mark.parametrize("part", ["\ud800", "\x00", "\x1b", "\u202e", "\u2066", "\u200b"])
def test_what_is_no_text_or_turns_around_what_follows_is_shown_as_such(part):
    made = markup.document(part, "", [markup.node("p", f"a{part}b\n\tc", class_=part)])
    made.encode("utf-8")
    assert part not in made and "a\ufffdb\n\tc" in made


def test_the_page_names_no_address_and_forbids_itself_to_load_or_run_anything(sample):
    addresses = set(re.findall(r"[a-z]+://[^\s<]*|url\(|@import", sample))
    assert not addresses, addresses
    policies = [
        value for name, value in Held(sample).attributes if name == "content" and value.startswith("default-src")
    ]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_every_kernel_that_was_measured_is_in_a_chart_against_context_and_in_the_table(sample):
    runs = [run for path in MEASURED for run in schema.load(path)]
    taken, others = times.times(runs)
    names = {(run.metric, run.case) for run in others}
    for of_gpu in taken:
        charted = {k for cases in times.groups(of_gpu) for k in of_gpu.kernels for c in cases if of_gpu.us(k, c)}
        assert charted == set(of_gpu.kernels)
        for kernel in of_gpu.kernels:
            assert f"{kernel}: " in sample  # a tooltip
            assert kernel in Held(sample).text
    for run in runs:  # nothing that was measured is lost
        kernel = times.kernel_of(run)
        assert (run.metric, run.case) in names or any((kernel, run.case) in of_gpu.held for of_gpu in taken)


def test_the_newest_figure_of_a_kernel_is_shown_and_speed_up_and_share_follow_from_it(tmp_path):
    def run(metric, us, day):
        where = replace(WHERE, date=f"2026-01-{day:02}T00:00:00Z")
        return schema.Measurement.of(CASES[0], metric, "us", [us], where)

    runs = [run("verify_wgmma", 33.8, 3), run("verify", 60.0, 2), run("triton", 338.0, 2), run("triton", 999.0, 1)]
    (taken,), others = times.times(runs)
    case = case_of(CASES[0])
    assert taken.kernels == ["treemla", "SGLang Triton"] and not others
    assert taken.us("treemla", case) == 33.8 and taken.faster("SGLang Triton", case) == pytest.approx(10.0)
    assert taken.share("treemla", case) == pytest.approx(50.0, rel=0.01)  # its floor is 16.9 us, worked out by hand
    assert taken.faster("treemla", case) is None
    text = Held(made_of(tmp_path, runs=runs)).text
    assert "338.0 (10.0x)" in text and "50%" in text


def test_a_kernel_with_pages_of_its_own_stands_beside_ours_and_time_in_l2_beside_no_roofline():
    paged = CASES[0].replace("-p1-", "-p64-")
    runs = [
        schema.Measurement.of(case, metric, "us", [us], WHERE)
        for case, metric, us in [
            (CASES[0], "verify", 30.0),
            (paged, "flashmla", 60.0),
            (CASES[0], "verify_mma_warm", 9.0),
        ]
    ]
    taken, _ = times.times(runs)
    cold, warm = sorted(taken, key=lambda held: held.warm)
    case, kernel = case_of(CASES[0]), "FlashMLA (no tree mask, no page size 1)"
    assert cold.faster(kernel, case) == 2.0 and cold.cases == [case]
    assert warm.us("treemla, mma", case) == 9.0 and warm.share("treemla, mma", case) is None


def test_tilings_that_tune_tried_are_counted_and_not_drawn(tmp_path):
    runs = [schema.Measurement.of(CASES[0], f"verify_wgmma_r72_p{n}_o6", "us", [9.0 + n], WHERE) for n in range(3)]
    held = Held(made_of(tmp_path, runs=runs))
    assert "3 times of tilings" in held.text and "r72" not in held.text and "svg" not in held.tags


def test_history_has_its_steps_and_blessings(sample):
    held = Held(sample)
    marks = [value for name, value in held.attributes if name == "class" and value.startswith("mark")]
    assert marks == ["mark step", "mark blessing", "mark blessing"]
    assert "+8.2% from 131313131313 on" in held.text and "blessed b-0001, 2026-02-03: 55.3: first figures" in held.text


def test_a_blessing_of_another_machine_or_metric_is_not_drawn(tmp_path):
    runs = [run for run in sample_report.nights() if run.metric == "verify"]
    ledger = [replace(blessing, machine="f" * 12) for blessing in sample_report.blessings("r")]
    lines = [*ledger, replace(ledger[0], machine=WHERE.fingerprint, metric="triton_ratio")]
    (tmp_path / page.bless.LEDGER).write_text("".join(json.dumps(vars(line)) + "\n" for line in lines))
    assert "blessed" not in Held(made_of(tmp_path, runs=runs)).text.replace("where a figure was blessed", "")


def test_files_of_one_name_are_all_read(tmp_path):
    """As `gate --out` leaves them: sessions.jsonl, a folder a start of the machine."""
    runs = [run for run in sample_report.nights() if run.metric == "verify" and run.case == CASES[0]]
    sources = [tmp_path / str(n) / "sessions.jsonl" for n in range(3)]
    for n, source in enumerate(sources):
        schema.dump(source, runs[n : n + 1])
    held = Held(page.page(merge.merge(sources, {}), page.gather(sources, tmp_path)))
    assert f"{CASES[0]} verify{WHERE.fingerprint}3" in held.text  # runs


def test_a_ledger_that_cannot_be_read_is_said_where_its_blessings_would_be(tmp_path):
    (tmp_path / page.bless.LEDGER).write_text("{}\n")
    text = Held(made_of(tmp_path, runs=sample_report.nights())).text
    assert "Blessings are not drawn" in text and "expected a blessing" in text


def test_a_kernel_that_changed_shows_which_instructions_did(sample):
    text = Held(sample).text
    assert "kernelclassglobal load 640128+128" in text and "loop 1opcodeFFMA300330+30" in text
    assert "LDS.128" not in text  # as many as before


@pytest.mark.parametrize("data", [{}, {"old": 1, "new": 2}, {"old": {}, "new": {}}, {"new": {"opcodes": {"A": "1"}}}])
def test_counts_of_another_form_are_left_out(tmp_path, data):
    made = made_of(tmp_path, Findings("static", (Finding("k", "changed", Exit.PASS, "", {}, data),)))
    assert "instructions that changed" not in made


def test_sources_that_cannot_be_read_are_red_on_a_page_that_is_written_all_the_same(tmp_path, capsys):
    bad = {"a.json": "{", "b.jsonl": "not json", "c.xml": "<html/>", "d.jsonl": ""}
    for name, text in bad.items():
        (tmp_path / name).write_text(text)
    out = tmp_path / "deep/er/report.html"
    sources = [str(tmp_path / name) for name in (*bad, "absent.jsonl")]
    assert cli.main(["report", *sources, "--html", str(out)]) == Exit.NOTHING_MEASURED
    assert Held(out.read_text()).text.count("NOTHING_MEASURED") >= len(sources)


def test_a_report_of_measurements_counts_them(tmp_path, capsys):
    out = tmp_path / "report.html"
    times_of_kernels = next(path for path in MEASURED if path.stem.endswith("gpu-perf"))
    assert cli.main(["report", str(times_of_kernels), "--html", str(out)]) == Exit.PASS
    assert str(len(schema.load(times_of_kernels))) in capsys.readouterr().out.split()
    assert "Times on NVIDIA H200" in out.read_text()


def test_the_page_is_no_source_of_its_own_and_a_full_disk_is_no_pass(tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    schema.dump(source, sample_report.nights())
    assert cli.main(["report", str(source), "--html", str(source)]) == Exit.USAGE
    assert schema.load(source)
    if Path("/dev/full").exists():
        assert cli.main(["report", str(source), "--html", "/dev/full"]) == Exit.USAGE
        assert "not written" in capsys.readouterr().out
