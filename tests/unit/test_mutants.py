"""The catalogue of faults still fits the sources; tests/mutants/run.py tries them."""

import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
MUTANTS = tomllib.loads((CHECKOUT / "tests/mutants/catalogue.toml").read_text())["mutant"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_mutant_changes_one_place_and_names_a_test_that_exists(mutant: dict) -> None:
    assert (CHECKOUT / mutant["file"]).read_text().count(mutant["old"]) == 1
    assert mutant["new"] != mutant["old"]
    assert mutant.get("device", "cpu") in {"cpu", "cuda"}
    path, _, function = mutant["tests"][0].partition("::")
    assert f"def {function or 'test_'}" in (CHECKOUT / path).read_text()


def test_names_are_unique() -> None:
    names = [mutant["name"] for mutant in MUTANTS]
    assert len(set(names)) == len(names)
