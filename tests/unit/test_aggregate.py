"""The one required check, on payloads as GitHub makes them: only success and whole reports are a pass."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from treemla.gate import layers
from treemla.gate.exits import Exit
from treemla.gate.findings import Finding, Findings

CHECKOUT = Path(__file__).parents[2]
WORKFLOWS = sorted((CHECKOUT / ".github/workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def aggregate():
    spec = importlib.util.spec_from_file_location("aggregate", CHECKOUT / ".ci/aggregate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def needs(**results):
    """The context `needs`, as toJSON prints it."""
    made = {"cpu": "success", "gpu": "success", "comment": "success", **results}
    return json.dumps({name: {"result": result, "outputs": {}} for name, result in made.items() if result}, indent=2)


@pytest.fixture
def reports(aggregate, tmp_path):
    """What a run in which all is well leaves."""
    for name, least in aggregate.TESTS.items():
        cases = "".join(f'<testcase classname="c" name="t{n}"/>' for n in range(least))
        (tmp_path / f"{name}.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    (tmp_path / "gate.json").write_text(Findings("gate", (Finding("a", "same", Exit.PASS),)).as_json())
    return tmp_path


@pytest.mark.parametrize("event", ["pull_request", "merge_group", "push"])
def test_all_well_is_ok(aggregate, reports, event):
    comment = "success" if event == "pull_request" else "skipped"
    assert aggregate.problems_of(needs(comment=comment), event, reports) == []


@pytest.mark.parametrize("job", ["cpu", "gpu", "comment"])
@pytest.mark.parametrize("result", ["failure", "cancelled", "skipped", "", "timed_out"])
def test_any_other_result_of_any_job_is_red(aggregate, reports, job, result):
    assert any(job in problem for problem in aggregate.problems_of(needs(**{job: result}), "pull_request", reports))


def test_builds_that_failed_and_tests_skipped_for_it_are_red(aggregate, reports):
    """The shape of NVIDIA/cuda-python#2208: 24 builds failed, what needed them was skipped, the check was green."""
    assert (
        len(aggregate.problems_of(needs(cpu="failure", gpu="skipped", comment="skipped"), "pull_request", reports)) == 3
    )


def test_a_fork_is_told_how_its_change_gets_to_the_gpu(aggregate, reports):
    found = aggregate.problems_of(needs(gpu="skipped", comment="skipped"), "pull_request", reports)
    assert any("pushed it to a branch" in problem for problem in found)


@pytest.mark.parametrize(
    "payload", ["", "null", "[]", "{}", '{"cpu": null}', '{"cpu": "success"}', "${{ toJSON(needs) }}"]
)
def test_a_payload_that_is_none_is_red(aggregate, reports, payload):
    assert aggregate.problems_of(payload, "push", reports)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("unit.xml", None, "no readable report"),
        ("unit.xml", "", "no readable report"),
        ("unit.xml", "<testsuites><testsuite tests='9999'/></testsuites>", "0 tests passed"),
        ("unit.xml", "<!DOCTYPE x [<!ENTITY a 'b'>]><testsuites/>", "document type"),
        (
            "gpu-graph.xml",
            "<testsuites>" + '<testcase name="a"/>' * 999 + "</testsuites>",
            "1 tests passed, 400 expected",
        ),
        ("gate.json", None, "no readable findings"),
        ("gate.json", "{}", "no readable findings"),
        ("gate.json", '{"exit": "PASS", "found": []}', "PASS with 0 findings"),
        ("gate.json", '{"exit": "AMBIGUOUS", "found": [1]}', "AMBIGUOUS"),
    ],
)
def test_a_report_that_is_missing_short_or_not_a_pass_is_red(aggregate, reports, file, text, said):
    (reports / file).unlink()
    if text is not None:
        (reports / file).write_text(text)
    (problem,) = aggregate.problems_of(needs(), "pull_request", reports)
    assert file in problem and said in problem


@pytest.mark.parametrize("tag", ["failure", "error", "skipped"])
def test_one_bad_test_is_red(aggregate, reports, tag):
    path = reports / "unit.xml"
    path.write_text(path.read_text().replace("<testsuite>", f'<testsuite><testcase name="bad"><{tag}/></testcase>'))
    assert any("bad first" in problem for problem in aggregate.problems_of(needs(), "push", reports))


def test_every_report_is_that_of_a_layer(aggregate):
    assert set(aggregate.TESTS) - {"browser"} <= set(layers.LAYERS)
    assert "build/browser.xml" in (CHECKOUT / "noxfile.py").read_text()


def jobs_of(text, job):
    return re.search(rf"^  {job}:.*?(?=^  \w+:|\Z)", text, re.MULTILINE | re.DOTALL).group()


def test_the_check_needs_every_job_and_the_table_knows_them(aggregate):
    text = (CHECKOUT / ".github/workflows/ci.yml").read_text()
    jobs = re.findall(r"^  (\w+):", text.partition("\njobs:\n")[2], re.MULTILINE)
    assert set(jobs) - {"ok"} == set(aggregate.JOBS)
    assert f"needs: [{', '.join(aggregate.JOBS)}]" in jobs_of(text, "ok") and "if: always()" in jobs_of(text, "ok")


def test_workflows_name_sessions_that_exist():
    held = (CHECKOUT / "noxfile.py").read_text()
    sessions = set(re.findall(r'@nox\.session\(name="([^"]+)"\)', held)) | set(
        re.findall(r"^def (\w+)\(session: ", held, re.MULTILINE)
    )
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    named = set(re.findall(r"nox -s ([\w-]+)", text))
    named |= set(re.search(r"session: \[(.*)\]", text).group(1).split(", "))
    assert named <= sessions and len(named) > 8


def test_actions_are_pinned_and_no_event_text_reaches_a_shell():
    for path in WORKFLOWS:
        text = path.read_text()
        assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", used) for used in re.findall(r"uses: (\S+)", text))
        runs = re.findall(r"run: \|\n((?: {10,}.*\n)+)|run: (.+)", text)
        assert runs and not any("${{ github.event" in part or "github.head_ref" in part for run in runs for part in run)
        assert "pull_request_target" not in text and "permissions:\n  contents: read\n" in text
