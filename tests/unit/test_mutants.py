"""The catalogue of faults still fits the sources; tests/mutants/run.py tries them."""

import tomllib
from pathlib import Path

import pytest
from mutants import score

CHECKOUT = Path(__file__).parents[2]
MUTANTS = tomllib.loads((CHECKOUT / "tests/mutants/catalogue.toml").read_text())["mutant"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_mutant_changes_one_place_and_names_a_test_that_exists(mutant: dict) -> None:
    assert (CHECKOUT / mutant["file"]).read_text().count(mutant["old"]) == 1
    assert mutant["new"] != mutant["old"]
    assert mutant.get("device", "cpu") in {"cpu", "cuda"}
    assert mutant["gate"] in score.GATES
    path, _, function = mutant["tests"][0].partition("::")
    assert f"def {function or 'test_'}" in (CHECKOUT / path).read_text()


def test_names_are_unique() -> None:
    names = [mutant["name"] for mutant in MUTANTS]
    assert len(set(names)) == len(names)


def test_the_committed_page_is_what_the_outcomes_and_the_catalogue_make() -> None:
    assert score.PAGE.read_text() == score.page(MUTANTS, score.load()), "run: python tests/mutants/score.py"


def test_every_fault_of_the_merge_gate_was_noticed() -> None:
    outcomes = score.load()
    held = {
        m["name"]: score.verdict(m, outcomes.get(m["name"])) for m in MUTANTS if m["gate"] in score.MUST_BE_COMPLETE
    }
    assert {name: word for name, word in held.items() if word != "noticed"} == {}


def test_a_fault_that_was_edited_counts_as_not_tried(tmp_path) -> None:
    mutant, path = MUTANTS[0], tmp_path / "outcomes.json"
    score.record([(mutant, True, "tests/a.py::test_b"), (MUTANTS[1], False, "")], "c" * 40, path)
    outcomes = score.load(path)
    assert score.verdict(mutant, outcomes[mutant["name"]]) == "noticed"
    assert score.verdict({**mutant, "new": "else"}, outcomes[mutant["name"]]) == "not tried"
    assert score.verdict(MUTANTS[1], outcomes[MUTANTS[1]["name"]]) == "SURVIVED"
    made = score.page(MUTANTS, outcomes)
    assert f"| all | {len(MUTANTS)} | 1 | 1 | {len(MUTANTS) - 2} |" in made
    assert f"| {mutant['name']} | kernel | noticed | `test_b` | ccccccc |" in made
