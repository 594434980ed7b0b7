"""Finding, building and trusting cubins. A stand-in for nvcc keeps this without a compiler; tests/static uses the real one."""

import os
import subprocess
import sys

import pytest
import torch

from treemla import cubins, nvcc

FAKE_NVCC = """\
#!{python}
import pathlib, sys
if "--version" in sys.argv:
    print("Cuda compilation tools, release 13.0, V{version}")
    sys.exit()
source = pathlib.Path("treemla.cu").read_text()
if "broken" in source:
    sys.exit("treemla.cu(1): error: broken")
pathlib.Path({count!r}).open("a").write("compiled ")
pathlib.Path(sys.argv[-1]).write_text(source)
print("ptxas info : fine")
"""


@pytest.fixture
def csrc(tmp_path, monkeypatch):
    """A source folder, a compiler that copies, and a cache of their own."""
    source = tmp_path / "repo" / "csrc"
    source.mkdir(parents=True)
    (source / nvcc.UNIT).write_text("kernels")
    monkeypatch.setattr(cubins, "CSRC", source)
    monkeypatch.setattr(cubins, "PACKAGED", tmp_path / "packaged")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (nvcc.Path(entry) / "nvidia/cu13").exists()])
    install_nvcc(tmp_path, monkeypatch)
    return source


def install_nvcc(tmp_path, monkeypatch, version="13.0.88"):
    tool = tmp_path / "bin" / "nvcc"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(FAKE_NVCC.format(python=sys.executable, version=version, count=str(tmp_path / "count")))
    tool.chmod(0o755)
    gpp = tool.with_name("g++")
    gpp.write_text("")
    gpp.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))


def compiled(tmp_path):
    """How often the compiler ran."""
    count = tmp_path / "count"
    return len(count.read_text().split()) if count.exists() else 0


def test_a_cubin_is_built_once_and_then_found_with_its_log(csrc, tmp_path):
    first = cubins.cubin_path("sm_90a")
    assert cubins.cubin_path("sm_90a") == first
    assert (first.read_text(), nvcc.log_path(first).read_text()) == ("kernels", "ptxas info : fine\n")
    assert compiled(tmp_path) == 1


@pytest.mark.parametrize("change", ["source", "header", "new file", "compiler", "flags"])
def test_a_change_of_source_compiler_or_flags_builds_anew(csrc, tmp_path, monkeypatch, change):
    (csrc / "tile.cuh").write_text("tile")
    before = cubins.cubin_path("sm_90a")
    if change == "source":
        (csrc / nvcc.UNIT).write_text("KERNELS")
    elif change == "header":
        (csrc / "tile.cuh").write_text("TILE")
    elif change == "new file":
        (csrc / "more.cuh").write_text("")
    elif change == "compiler":
        install_nvcc(tmp_path, monkeypatch, version="13.0.99")
    else:
        monkeypatch.setattr(nvcc, "FLAGS", (*nvcc.FLAGS, "-G"))
    assert cubins.cubin_path("sm_90a") != before
    assert compiled(tmp_path) == 2


def test_text_that_reads_like_another_file_does_not_pass_for_it(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    two.mkdir()
    one.mkdir()
    (two / "x.cuh").write_text("a")
    (two / "y.cuh").write_text("b")
    (one / "x.cuh").write_text("a\0y.cuh\0" + "b")
    assert nvcc.source_hash(two, "sm_90a") != nvcc.source_hash(one, "sm_90a")


def test_the_architectures_do_not_share_a_build(csrc, tmp_path):
    assert cubins.cubin_path("sm_90a") != cubins.cubin_path("sm_120a")
    assert compiled(tmp_path) == 2


def test_processes_that_ask_at_once_compile_once(csrc, tmp_path):
    code = f"""
import sys; sys.path = [e for e in sys.path if "site-packages" not in e]
import importlib.util, pathlib
spec = importlib.util.spec_from_file_location("nvcc", {nvcc.__file__!r})
nvcc = importlib.util.module_from_spec(spec); spec.loader.exec_module(nvcc)
print(nvcc.build(pathlib.Path({str(csrc)!r}), "sm_90a"))
"""
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    paths = {process.communicate(timeout=60)[0] for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert len(paths) == 1
    assert compiled(tmp_path) == 1


def test_source_that_nvcc_rejects_is_an_error_with_its_words_and_leaves_nothing(csrc, tmp_path):
    (csrc / nvcc.UNIT).write_text("broken")
    with pytest.raises(nvcc.NvccError, match=r"error: broken") as caught:
        cubins.cubin_path("sm_90a")
    assert not isinstance(caught.value, nvcc.NvccMissing)
    assert [path.name for path in (tmp_path / "cache" / "treemla").iterdir()] == ["lock"]


def test_without_nvcc_the_error_says_what_to_install(csrc, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        nvcc.NvccMissing, match=r"expected a CUDA 13 compiler, found none; pip install 'nvidia-cuda-nvcc"
    ):
        cubins.cubin_path("sm_90a")


def test_an_nvcc_of_another_release_is_passed_over(csrc, tmp_path, monkeypatch):
    install_nvcc(tmp_path, monkeypatch, version="12.9.41")
    with pytest.raises(nvcc.NvccMissing, match=r"12\.9\.41"):
        cubins.cubin_path("sm_90a")


def test_without_a_host_compiler_the_error_names_it(csrc, tmp_path):
    (tmp_path / "bin" / "g++").unlink()
    with pytest.raises(nvcc.NvccMissing, match=r"g\+\+"):
        cubins.cubin_path("sm_90a")


def test_the_cache_is_private_even_where_it_was_not(csrc, tmp_path):
    directory = tmp_path / "cache" / "treemla"
    directory.mkdir(parents=True, mode=0o777)
    cubins.cubin_path("sm_90a")
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_is_a_link_or_anothers_is_refused(csrc, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "treemla").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(nvcc.NvccError, match=r"expected a directory of user"):
        cubins.cubin_path("sm_90a")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(nvcc.NvccError, match=r"expected a directory of user 12345"):
        nvcc.private_directory(tmp_path / "elsewhere")


def package(directory, csrc):
    directory.mkdir()
    (directory / "sm_90a.cubin").write_text("packaged")
    (directory / "sm_90a.source").write_text(nvcc.source_hash(csrc, "sm_90a") + "\n")


def test_a_packaged_cubin_is_used_without_a_compiler(csrc, tmp_path, monkeypatch):
    package(tmp_path / "packaged", csrc)
    monkeypatch.setattr(cubins, "CSRC", tmp_path / "nowhere")
    monkeypatch.setenv("PATH", "")
    assert cubins.cubin_path("sm_90a").read_text() == "packaged"


def test_a_packaged_cubin_counts_only_while_the_source_beside_it_is_its_own(csrc, tmp_path):
    package(tmp_path / "packaged", csrc)
    assert cubins.cubin_path("sm_90a").read_text() == "packaged"
    (csrc / nvcc.UNIT).write_text("newer kernels")
    assert cubins.cubin_path("sm_90a").read_text() == "newer kernels"


def test_a_package_without_cubins_says_so(csrc, tmp_path, monkeypatch):
    monkeypatch.setattr(cubins, "CSRC", tmp_path / "nowhere")
    with pytest.raises(RuntimeError, match=r"no cubin for sm_90a: .*could not compile"):
        cubins.cubin_path("sm_90a")


def test_an_architecture_that_is_no_target_is_refused():
    with pytest.raises(ValueError, match="arch: expected one of sm_90a, sm_120a, got 'sm_80'"):
        cubins.cubin_path("sm_80")


@pytest.mark.parametrize(("capability", "arch"), [((9, 0), "sm_90a"), ((12, 0), "sm_120a")])
def test_a_gpu_gets_the_cubin_of_its_compute_capability(monkeypatch, capability, arch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert cubins.target_of(torch.device("cuda", 0)).arch == arch


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 1)])
def test_a_gpu_without_a_cubin_is_an_error_that_names_it(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Other GPU")
    with pytest.raises(
        RuntimeError, match=rf"expected a GPU for sm_90a .*got Other GPU \({capability[0]}\.{capability[1]}\)"
    ):
        cubins.target_of(torch.device("cuda", 0))
