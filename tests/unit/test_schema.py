"""Measurements as data: the writer and the schema file agree, and a file that lies does not load."""

import json
from dataclasses import asdict

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treemla.gate import fingerprint, schema
from treemla.gate.cases import CASES, PEER_CASES, WARM_CASES

WHERE = schema.Where(
    "NVIDIA H200", "580.1", "13.0", "2.11.0", None, None, "0" * 40, "2026-01-02T03:04:05Z", "python -m treemla bench"
)
SAMPLES = st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=20)
VALIDATOR = jsonschema.Draft202012Validator(json.loads(schema.SCHEMA.read_text()))


def measurement(**changed):
    made = schema.Measurement.of("verify-b1-c64-t9-h8-p1-bf16", "verify", "us", [3.0, 1.0, 2.0], WHERE)
    return json.loads(json.dumps(asdict(made))) | changed


@given(SAMPLES)
def test_what_is_written_is_read_back_and_fits_the_schema_file(tmp_path_factory, samples):
    path = tmp_path_factory.mktemp("results") / "a.jsonl"
    made = schema.Measurement.of(CASES[0].id, "verify", "us", samples, WHERE)
    schema.dump(path, [made, made])
    assert schema.load(path) == [made, made]
    for line in path.read_text().splitlines():
        VALIDATOR.validate(json.loads(line))


def test_value_is_the_median_and_mad_the_median_absolute_deviation():
    made = schema.Measurement.of("verify-x", "verify", "us", [1.0, 2.0, 3.0, 4.0, 100.0], WHERE)
    assert (made.value, made.mad) == (3.0, 1.0)


@pytest.mark.parametrize("samples", [[], [0.0], [-1.0], [float("nan")], [1.0, float("inf")]])
def test_samples_that_no_clock_gives_are_refused(samples):
    with pytest.raises(ValueError, match="expected positive finite numbers"):
        schema.Measurement.of("verify-x", "verify", "us", samples, WHERE)


@pytest.mark.parametrize(
    "record",
    [
        {},
        [],
        measurement(value=1.5),
        measurement(mad=0.0),
        measurement(comment="x"),
        measurement(samples=[]),
        measurement(where={}),
        {key: value for key, value in measurement().items() if key != "case"},
    ],
)
def test_a_record_that_was_edited_or_cut_does_not_load(tmp_path, record):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(measurement()) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: expected a measurement"):
        schema.load(path)


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (measurement(case=5), "case: expected str, got 5"),
        (measurement(mad=True), "mad: expected float"),
        (measurement(samples="123"), "samples"),
        (measurement(samples=[1.0, "2", 3.0]), r"samples\[1\]: expected float, got '2'"),
        (measurement(samples=[10**400]), r"samples\[0\]"),
        (measurement(where={**asdict(WHERE), "fingerprint": ["a"]}), "where: fingerprint: expected str"),
        (measurement(where={**asdict(WHERE), "start": 3}), "where: start"),
        (measurement(where={**asdict(WHERE), "date": 20260102}), "where: date"),
        (measurement(where=3), "where: expected an object"),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path, record, named):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=named):
        schema.load(path)


def test_bytes_that_are_no_text_do_not_load_and_the_file_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a\.jsonl: expected a file of UTF-8 text"):
        schema.load(path)


@pytest.mark.parametrize("text", ["", "\n", "{", '{"case": "verify'])
def test_an_empty_or_truncated_file_does_not_load(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected"):
        schema.load(path)


def test_a_fingerprint_of_this_machine_fits_the_schema_file():
    VALIDATOR.validate(measurement(where=asdict(fingerprint.collect("abc"))))


def test_a_commit_that_the_caller_names_is_kept():
    assert fingerprint.collect("abc").treemla == "abc"


def test_case_ids_are_distinct_and_fit_the_schema_file():
    for cases in (CASES, PEER_CASES, WARM_CASES):
        assert len({case.id for case in cases}) == len(cases)
        for case in cases:
            VALIDATOR.validate(measurement(case=case.id))


def test_a_file_from_before_peers_were_timed_loads(tmp_path):
    path = tmp_path / "a.jsonl"
    old = measurement()
    del old["where"]["peer"]
    path.write_text(json.dumps(old) + "\n")
    assert schema.load(path)[0].where == WHERE
    VALIDATOR.validate(old)
