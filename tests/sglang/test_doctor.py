"""`treemla doctor` says in one line each what keeps SGLang from the plug-in."""

import sys

import pytest

from treemla.gate import doctor
from treemla.sglang import compat


def facts():
    return {fact.name: fact for fact in doctor._sglang()}


def test_where_all_is_well_no_line_has_a_problem():
    found = facts()
    assert list(found) == ["sglang", "sglang plug-in", "sglang backend"]
    assert not any(fact.problem or fact.remedy for fact in found.values())
    assert doctor.sglang_problem() == ""


def test_no_sglang(monkeypatch):
    monkeypatch.setattr(compat, "installed", lambda: None)
    (fact,) = doctor._sglang()
    assert fact.problem and "treemla[sglang]" in fact.remedy
    assert doctor.sglang_problem() == "sglang: not installed"


def test_an_untested_version(monkeypatch):
    monkeypatch.setattr(compat, "installed", lambda: "9.9.9")
    assert "none of the tested versions" in facts()["sglang"].problem


def test_a_checkout_on_the_path_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(doctor, "plugin_entry_points", list)
    assert "pip install" in facts()["sglang plug-in"].remedy
    assert "treemla is not installed here" in doctor.sglang_problem()


@pytest.mark.parametrize(("chosen", "is_problem"), [("other", True), ("other,treemla", False), ("", False)])
def test_a_list_of_plug_ins_that_leaves_it_out(monkeypatch, chosen, is_problem):
    monkeypatch.setenv("SGLANG_PLUGINS", chosen)
    assert bool(facts()["sglang plug-in"].problem) is is_problem


def test_a_contract_that_does_not_hold(monkeypatch):
    monkeypatch.setattr(compat, "_find", lambda path: None)
    fact = facts()["sglang backend"]
    assert "is gone" in fact.problem and "\n" not in fact.problem


def test_an_sglang_that_does_not_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", None)
    assert "SGLang does not import" in facts()["sglang backend"].problem
