"""Stored constants: found for the GPU, kernel and cubin they were measured on, refused where they are none."""

import json
import math
import stat
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from treemla import cost, nvcc, tuned
from treemla.plan import VerifyPlan
from treemla.problem import VerifyShape
from treemla.tiles import WGMMA

OF = tuned.Fingerprint("NVIDIA H200", 132, 150_000_000_000, "wgmma", "0" * 64)
MADE = replace(cost.DEFAULTS["wgmma"], tile_us=0.1, tile_row_us=0.1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuned.constants.cache_clear()
    yield tmp_path
    tuned.constants.cache_clear()


def store() -> tuned.Path:
    return tuned.store(OF, MADE, "2026-01-02T03:04:05Z", "python -m treemla tune")


def test_what_was_stored_is_loaded() -> None:
    assert tuned.load(OF) is None
    store()
    assert tuned.load(OF) == MADE


def test_looking_for_constants_makes_no_directory(cache) -> None:
    tuned.load(OF)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "changed", [{"gpu": "other"}, {"sms": 78}, {"memory_bytes": 1}, {"kernel": "mma"}, {"cubin": "1" * 64}]
)
def test_another_gpu_kernel_or_cubin_has_none(changed) -> None:
    store()
    assert tuned.load(replace(OF, **changed)) is None


def test_the_directory_is_private(cache) -> None:
    store()
    assert stat.S_IMODE((cache / "treemla").stat().st_mode) == 0o700
    assert len(list((cache / "treemla").iterdir())) == 1


def test_a_link_in_place_of_the_directory_is_refused(cache, tmp_path) -> None:
    store()
    (cache / "treemla").rename(tmp_path / "elsewhere")
    (cache / "treemla").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(nvcc.NvccError, match="expected a directory of user"):
        tuned.load(OF)


@pytest.mark.parametrize(
    "edit",
    [
        lambda record: record["constants"].pop("layer_us"),
        lambda record: record["constants"].update(extra=1.0),
        lambda record: record["constants"].update(layer_us=0.0),
        lambda record: record["constants"].update(layer_us=math.nan),
        lambda record: record["constants"].update(layer_us="7"),
        lambda record: record["fingerprint"].update(sms=78),
        lambda record: record.pop("fingerprint"),
    ],
)
def test_a_file_that_was_edited_is_named(edit) -> None:
    path = store()
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"{path}: expected what `python -m treemla tune` wrote"):
        tuned.load(OF)


def test_a_file_that_is_cut_short_is_named() -> None:
    path = store()
    path.write_text(path.read_text()[:40])
    with pytest.raises(ValueError, match="delete it or tune again"):
        tuned.load(OF)


def test_a_user_without_a_home_has_none(monkeypatch) -> None:
    def no_home() -> tuned.Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(nvcc, "cache_root", no_home)
    assert tuned.load(OF) is None


def tiling_of_a_plan(monkeypatch, contexts) -> cost.Tiling:
    """What a plan of T = 9, H = 8 takes on a GPU with OF's fingerprint."""
    plan = VerifyPlan(VerifyShape(8, 9), 1, "cpu", path="wgmma")
    plan.device = torch.device("cuda", 0)
    monkeypatch.setattr(tuned, "fingerprint", lambda device, kernel: replace(OF, kernel=kernel.name))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return plan._tiling(contexts)


def test_a_plan_on_a_gpu_that_was_not_tuned_takes_the_defaults(monkeypatch) -> None:
    made = tiling_of_a_plan(monkeypatch, (4096,))
    assert made == cost.choose(cost.DEFAULTS["wgmma"], WGMMA, VerifyShape(8, 9), 132, ((4096,),))


def test_a_plan_takes_what_was_stored(monkeypatch) -> None:
    """Arithmetic so dear by the row that a long context, too, takes the lower blocks."""
    before = tiling_of_a_plan(monkeypatch, (65536,))
    tuned.constants.cache_clear()
    store()
    made = tiling_of_a_plan(monkeypatch, (65536,))
    assert made == cost.choose(MADE, WGMMA, VerifyShape(8, 9), 132, ((65536,),))
    assert made != before


def test_plans_of_one_process_do_not_change_when_it_is_tuned(monkeypatch) -> None:
    before = tiling_of_a_plan(monkeypatch, (65536,))
    store()
    assert tiling_of_a_plan(monkeypatch, (65536,)) == before
