"""Merged reports: what is missing, cut short, skipped, or fewer than expected is never a pass."""

import pytest

from treemla.gate import cli, merge
from treemla.gate.exits import Exit
from treemla.gate.findings import Finding, Findings

GOOD = '<testsuites><testsuite tests="2"><testcase classname="a" name="x"/><testcase classname="a" name="y"/></testsuite></testsuites>'
BOMB = (
    '<!DOCTYPE b [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]><testsuites><testcase name="&b;"/></testsuites>'
)
OUTSIDE = '<!DOCTYPE b [<!ENTITY a SYSTEM "file:///etc/hostname">]><testsuites><testcase name="&a;"/></testsuites>'


def merged(tmp_path, text, expected=None):
    path = tmp_path / "unit.xml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return merge.merge([path], expected or {})


def test_all_passed_is_a_pass(tmp_path):
    assert merged(tmp_path, GOOD, {"unit": 2}).exit is Exit.PASS


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        GOOD[:-20],
        "<html/>",
        "not xml",
        BOMB,
        OUTSIDE,
        OUTSIDE.encode("utf-16"),
        '<testsuites><testsuite tests="6"/></testsuites>',
        "<testsuites><testcase name='a'><skipped/></testcase></testsuites>",
        GOOD.replace("<testcase", "<testcase name='a'><skipped/></testcase><testcase", 1),
    ],
)
def test_a_report_that_is_missing_broken_hostile_empty_or_skipping_is_no_pass(tmp_path, text):
    assert merged(tmp_path, text).exit is Exit.NOTHING_MEASURED


@pytest.mark.parametrize("tag", ["failure", "error"])
@pytest.mark.parametrize(
    "nest", ["{}", "<testsuite>{}</testsuite>", "<testsuite><testsuite>{}</testsuite></testsuite>"]
)
def test_a_failure_at_any_depth_is_red(tmp_path, tag, nest):
    case = nest.format(f"<testcase name='a'><{tag}/></testcase>")
    assert merged(tmp_path, f"<testsuites>{case}</testsuites>").exit is Exit.FAILED


def test_a_suite_at_the_root_counts(tmp_path):
    assert merged(tmp_path, '<testsuite><testcase name="a"/></testsuite>').exit is Exit.PASS


def test_a_test_that_was_run_again_counts_once_and_its_failure_stays(tmp_path):
    again = '<testsuites><testcase classname="a" name="x"><failure/></testcase><testcase classname="a" name="x"/></testsuites>'
    made = merged(tmp_path, again, {"unit": 2})
    assert made.exit is Exit.FAILED and "1 tests ran, 2 expected" in made.found[0].text


def test_fewer_tests_than_expected_and_a_layer_without_a_report_are_red(tmp_path):
    made = merged(tmp_path, GOOD, {"unit": 3, "static": 1})
    assert [(f.name, f.exit) for f in made.found] == [
        ("unit", Exit.NOTHING_MEASURED),
        ("static", Exit.NOTHING_MEASURED),
    ]


def test_verbs_and_layers_are_merged_by_the_command(tmp_path, capsys):
    (tmp_path / "unit.xml").write_text(GOOD)
    for name, code in (("gate", Exit.AMBIGUOUS), ("static", Exit.PASS)):
        (tmp_path / f"{name}.json").write_text(Findings(name, (Finding("k", "v", code, "why"),)).as_json())
    sources = [str(tmp_path / name) for name in ("unit.xml", "gate.json", "static.json")]
    assert cli.main(["report", *sources, "--md", str(tmp_path / "all.md")]) == Exit.AMBIGUOUS
    assert "k: why" in (tmp_path / "all.md").read_text()
    assert cli.main(["report", sources[0], sources[2], "--expect", "unit=2"]) == Exit.PASS
    for pair in ("unit", "unit=", "=2", "unit=²", "unit=٢", "unit=-1", "unit=" + "9" * 5000):
        assert cli.main(["report", sources[0], "--expect", pair]) == Exit.USAGE
    assert cli.main(["report", str(tmp_path / "absent.json")]) == Exit.NOTHING_MEASURED
