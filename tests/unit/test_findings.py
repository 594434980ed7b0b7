"""Findings in each form: one verdict, never a pass that is none, and nothing in a name that a reader would act on."""

import json
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treemla.gate.exits import Exit, gravest
from treemla.gate.findings import MARKER, MAX_MARKDOWN, Finding, Findings

SAME = Finding("case-a", "same", Exit.PASS, "", {"us": "50.6"}, {"us": [50.6]})
SLOWER = Finding("case-b", "regression", Exit.FAILED, "+5.0% beside the base", {"us": "53.1", "vs base": "+5.0%"})
UNKNOWN = Finding("case-c", "ambiguous", Exit.AMBIGUOUS, "too noisy")
EXITS = st.lists(st.sampled_from(list(Exit)), min_size=1)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=40)


@given(EXITS)
def test_only_passes_pass(exits):
    assert (gravest(exits) is Exit.PASS) == (set(exits) == {Exit.PASS})
    assert gravest(exits) in exits


def test_a_failure_is_the_gravest_and_nothing_found_is_no_pass():
    assert gravest(Exit) is Exit.FAILED
    assert Findings("gate", ()).exit is Exit.NOTHING_MEASURED


def test_the_last_line_is_the_verdict_and_what_is_wrong_is_said_before_it():
    said = Findings("gate", (SAME, SLOWER, UNKNOWN), ("Detectable today: +3.2%.",)).text().splitlines()
    assert said[-1] == "gate: FAILED (1 same · 1 regression · 1 ambiguous)"
    assert said[-3:-1] == ["FAILED: case-b: +5.0% beside the base", "AMBIGUOUS: case-c: too noisy"]
    assert "Detectable today: +3.2%." in said


@pytest.mark.parametrize("found", [(), (SAME,), (SAME, SLOWER, UNKNOWN)])
def test_json_is_read_back_as_it_was(found):
    made = Findings("gate", found, ("note",))
    assert Findings.from_json(made.as_json()) == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"title": "gate", "exit": "PASS", "found": [], "notes": []}',
        '{"title": "gate"',
        "\0",
        "[" * 99_999,
    ],
)
def test_json_that_is_none_or_claims_a_pass_is_an_error(text):
    with pytest.raises(ValueError, match="expected"):
        Findings.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"name": 5},
        {"verdict": None},
        {"text": []},
        {"cells": 3},
        {"cells": {"us": 1}},
        {"data": []},
        {"more": 1},
        {"exit": 1},
        {"text": "\ud800"},
    ],
)
def test_a_finding_with_a_field_of_another_type_is_an_error(change):
    held = json.loads(Findings("gate", (SLOWER,)).as_json())
    held["found"][0] |= change
    with pytest.raises(ValueError, match="expected findings as JSON"):
        Findings.from_json(json.dumps(held))


def test_a_verdict_edited_in_the_json_is_an_error():
    held = json.loads(Findings("gate", (SLOWER,)).as_json())
    with pytest.raises(ValueError, match="expected FAILED"):
        Findings.from_json(json.dumps({**held, "exit": "PASS"}))


@given(st.lists(st.tuples(NAMES, st.sampled_from(list(Exit)), NAMES), max_size=5))
def test_junit_has_a_case_a_finding_and_none_but_passes_pass(given_findings):
    found = tuple(Finding(name, "v", code, text) for name, code, text in given_findings)
    suite = ET.fromstring(Findings("gate", found).as_junit()).find("testsuite")
    cases = suite.findall("testcase")
    wrong = [case for case in cases if len(case)]
    assert len(cases) == int(suite.get("tests")) == max(1, len(found))
    assert len(wrong) == (sum(f.exit is not Exit.PASS for f in found) or (not found))
    assert int(suite.get("failures")) + int(suite.get("errors")) == len(wrong)


def test_markdown_has_the_verdict_first_and_the_gravest_rows_above_the_fold():
    made = Findings("gate", (*[SAME] * 20, SLOWER)).as_markdown().splitlines()
    assert made[0] == MARKER and made[1].startswith("### ❌ gate: FAILED")
    rows = [line for line in made if line.startswith("| case-")]
    assert "case-b" in rows[0] and len(rows) == 21
    assert made.index("<details><summary>all cases</summary>", 0) > made.index(rows[11])


@pytest.mark.parametrize("hostile", ["a|b", "<img src=x>", "@everyone", "`x`", "[x](http://y)", "a\nb", "**x**", "\\|"])
def test_no_name_is_taken_for_markup(hostile):
    (row,) = [
        line for line in Findings("gate", (Finding(hostile, "same", Exit.PASS),)).as_markdown().splitlines()
        if line.startswith("| ") and not line.startswith("| case")
    ]  # fmt: skip
    bare = row.replace("\\\\", "").replace("\\|", "").replace("\\`", "").replace("\\*", "").replace("\\[", "")
    assert bare.count("|") == 3
    assert not any(text in bare for text in ("<img", "@e", "`", "**", "[x]"))


def test_markdown_stays_below_what_github_takes():
    made = Findings("gate", tuple(Finding(f"case-{n}", "regression", Exit.FAILED, "x" * 90) for n in range(2000)))
    text = made.as_markdown()
    assert len(text) < MAX_MARKDOWN + 100 and text.endswith("has the rest)\n")


def test_a_table_in_a_note_keeps_its_lines():
    text = Findings("gate", (SAME,), ("Loops:\n\na  b\n-  -\n1  ```\n",)).as_markdown()
    assert "<details><summary>Loops:</summary>\n\n```text\na  b\n-  -\n1  '''\n```\n\n</details>" in text
