"""The one required check: every job succeeded and left the reports that it must leave. Standard library only.

    NEEDS='{"cpu": {"result": "success"}, ...}' EVENT=pull_request python3 .ci/aggregate.py REPORTS_FOLDER

A job that was skipped, cancelled or is not there is a failure, unless MAY_SKIP says otherwise. So is a report that is
missing, unreadable, short, or holds a failed or skipped test.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree as ET

JOBS = ("cpu", "gpu", "comment")
MAY_SKIP = {"comment": {"push", "merge_group"}}  # job: events without it
# The least number of tests that each layer must have run.
TESTS = {"unit": 2400, "static": 20, "sglang": 500, "browser": 60, "gpu-parity": 1900, "gpu-graph": 400, "gpu-e2e": 14}
VERDICTS = ("gate",)  # findings as JSON


def main() -> int:
    problems = problems_of(os.environ.get("NEEDS", ""), os.environ.get("EVENT", ""), Path(sys.argv[1]))
    for problem in problems:
        print(f"::error::{problem}")
    print("ok" if not problems else f"{len(problems)} problems: not ok")
    return 1 if problems else 0


def problems_of(needs: str, event: str, reports: Path) -> list[str]:
    """A sentence each; none is the only pass."""
    try:
        results = {name: str(job["result"]) for name, job in json.loads(needs).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return [f"NEEDS: expected the needs of this job as JSON, got {needs[:80]!r}: {error}"]
    found = jobs(results, event)
    for name, least in TESTS.items():
        found += tests(reports / f"{name}.xml", least)
    for name in VERDICTS:
        found += verdict(reports / f"{name}.json")
    return found


def jobs(results: Mapping[str, str], event: str) -> list[str]:
    found = [f"{name}: expected in NEEDS, is not there" for name in JOBS if name not in results]
    for name, result in results.items():
        if result == "success" or (result == "skipped" and event in MAY_SKIP.get(name, ())):
            continue
        fork = "; a fork's change runs on the GPU machine once a maintainer has pushed it to a branch here (docs/ci.md)"
        found.append(f"{name}: {result}{fork if (name, result) == ('gpu', 'skipped') else ''}")
    return found


def tests(path: Path, least: int) -> list[str]:
    try:
        text = path.read_bytes()
        if b"\0" in text or b"<!DOCTYPE" in text or b"<!ENTITY" in text:
            return [f"{path.name}: expected UTF-8 without a document type or entities"]
        cases = list(ET.fromstring(text).iter("testcase"))
    except (OSError, ET.ParseError) as error:
        return [f"{path.name}: no readable report: {error}"]
    bad = [
        case.get("name") for case in cases if any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))
    ]
    found = [f"{path.name}: {len(bad)} tests failed or were skipped, {bad[0]} first"] if bad else []
    ran = len({(case.get("classname"), case.get("name")) for case in cases}) - len(bad)
    return [*found, f"{path.name}: {ran} tests passed, {least} expected"] if ran < least else found


def verdict(path: Path) -> list[str]:
    try:
        held = json.loads(path.read_text())
        code, count = held["exit"], len(held["found"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        return [f"{path.name}: no readable findings: {error}"]
    return [] if code == "PASS" and count else [f"{path.name}: {code} with {count} findings"]


if __name__ == "__main__":
    sys.exit(main())
