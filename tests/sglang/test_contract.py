"""What the backend needs of SGLang is there; each thing that upstream moves turns one test red, by name."""

import logging

import pytest
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from treemla.sglang import compat
from treemla.sglang.backend import TreemlaAttnBackend

OVERRIDES = [name for name in vars(TreemlaAttnBackend) if not name.startswith("_")]


def test_this_version_is_one_of_the_tested():
    assert compat.installed() in compat.TESTED


def test_nothing_of_the_contract_changed():
    assert list(compat.contract_changes(TreemlaAttnBackend)) == []


@pytest.mark.parametrize("name", OVERRIDES)
def test_override_has_the_parameters_of_its_base(name):
    only_this = type("Only", (TritonAttnBackend,), {name: vars(TreemlaAttnBackend)[name]})
    assert list(compat.override_changes(only_this)) == []


def test_every_method_of_the_contract_is_overridden():
    served = {"init_forward_metadata", "init_forward_metadata_out_graph", "init_forward_metadata_in_graph"}
    served |= {"init_cuda_graph_state", "get_cuda_graph_seq_len_fill_value", "forward_extend", "forward_decode"}
    assert served <= set(OVERRIDES)


@pytest.mark.parametrize("name", [name for name in OVERRIDES if name not in compat.VERSION_HOOKS])
def test_a_method_that_upstream_removed_is_named(name):
    base = type("Base", (), {"verify_mask": property(lambda self: None)})
    ours = type("Ours", (base,), {name: vars(TreemlaAttnBackend)[name]})
    assert list(compat.override_changes(ours)) == [f"Base.{name} is gone"]


def test_a_parameter_that_upstream_added_is_named():
    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, new_thing=None):
        pass

    base = type("Base", (), {"forward_decode": forward_decode, "verify_mask": property(lambda self: None)})
    ours = type("Ours", (base,), {"forward_decode": TreemlaAttnBackend.forward_decode})
    (change,) = compat.override_changes(ours)
    assert change.startswith("Base.forward_decode takes (") and "new_thing=None" in change


def test_a_mask_hand_over_that_nobody_knows_is_named():
    ours = type("Ours", (type("Base", (), {}),), {})
    (change,) = compat.override_changes(ours)
    assert "how the draft stage hands over its mask is unknown" in change


@pytest.mark.parametrize("path", [*compat.USED, *compat.VERIFY_INPUTS, compat.REPLAY_VIEW])
def test_a_name_that_upstream_moved_is_refused_with_the_remedy(path, monkeypatch):
    find = compat._find
    monkeypatch.setattr(compat, "_find", lambda asked: None if asked == path else find(asked))
    with pytest.raises(compat.UnsupportedSglang) as refused:
        compat.backend_class()
    assert f"{path.replace(':', '.')} is gone" in str(refused.value)
    assert "--attention-backend triton" in str(refused.value)


def test_a_verify_input_without_its_mask_is_named(monkeypatch):
    find, path = compat._find, compat.VERIFY_INPUTS[1]
    changed = type("NgramVerifyInput", (), {"__init__": lambda self, draft_token_num=None: None})
    monkeypatch.setattr(compat, "_find", lambda asked: changed if asked == path else find(asked))
    assert f"{path.replace(':', '.')} has no field custom_mask" in list(compat.contract_changes(TreemlaAttnBackend))


def test_an_unknown_version_starts_only_with_its_contract_intact(monkeypatch, caplog):
    monkeypatch.setattr(compat, "installed", lambda: "9.9.9")
    with caplog.at_level(logging.WARNING):
        assert compat.backend_class() is TreemlaAttnBackend
    assert "9.9.9 passed the contract check" in caplog.text
    monkeypatch.setattr(compat, "_find", lambda asked: None)
    with pytest.raises(compat.UnsupportedSglang, match=r"9\.9\.9 is not what treemla was written for"):
        compat.backend_class()
