"""Two trees under one harness: the library comes from the tree, the measuring code from here."""

import subprocess
import sys
import tarfile

import pytest

from treemla.gate import fingerprint, trees
from treemla.gate.exits import BaselineMissing
from treemla.gate.fingerprint import REPO
from treemla.gate.worker import Worker


@pytest.fixture
def base(tmp_path):
    """A tree with a library, and measuring code, of its own."""
    package = tmp_path / "base/src/treemla"
    (package / "gate").mkdir(parents=True)
    (package / "__init__.py").write_text("VERSION = 'base'\n")
    (package / "gate/__init__.py").write_text("raise ImportError('the measuring code of the base')\n")
    (tmp_path / "base/csrc").mkdir()
    (tmp_path / "base/csrc/treemla.cu").write_text("// base\n")
    return tmp_path / "base"


SAY = "import treemla, treemla.gate.exits as e; print(treemla.VERSION, e.Exit.AMBIGUOUS.value, treemla.__file__)"


def test_library_of_the_tree_and_measuring_code_of_this_checkout(base, tmp_path):
    source = trees.join(base, tmp_path / "joined")
    done = subprocess.run(
        [sys.executable, "-c", SAY], env={"PYTHONPATH": str(source)}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split()[:2] == ["base", "6"], done.stderr
    assert (tmp_path / "joined/csrc/treemla.cu").read_text() == "// base\n"


def test_worker_runs_the_library_of_its_tree(base, tmp_path):
    worker = Worker(version, source=trees.join(base, tmp_path / "joined"))
    worker.answer()
    assert worker.ask("index", "base") == 0
    worker.stop()


def version():
    import treemla

    return [treemla.VERSION]


def test_this_checkout_joined_with_itself_is_whole(tmp_path):
    source = trees.join(REPO, tmp_path / "joined")
    say = "import treemla.gate.side, treemla.cubins as c; print(c.CSRC.joinpath('treemla.cu').is_file())"
    done = subprocess.run(
        [sys.executable, "-c", say], env={"PYTHONPATH": str(source)}, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "True", done.stderr


def test_unpacked_wheel_is_a_tree(tmp_path):
    (tmp_path / "treemla").mkdir()
    (tmp_path / "treemla/__init__.py").touch()
    assert trees.library(tmp_path) == tmp_path / "treemla"


def test_folder_without_a_library_and_unknown_commit_are_said(tmp_path):
    with pytest.raises(BaselineMissing, match="a checkout or an unpacked wheel"):
        trees.find(str(tmp_path), tmp_path)
    with pytest.raises(BaselineMissing, match="neither a folder nor a commit"):
        trees.find("no-such-commit", tmp_path)


def test_a_branch_left_main_where_both_last_agreed_and_main_did_not(tmp_path, monkeypatch):
    monkeypatch.setattr(trees, "REPO", tmp_path)
    monkeypatch.setattr(fingerprint, "REPO", tmp_path)
    (tmp_path / "noxfile.py").touch()  # a checkout
    assert trees.fork_point() is None  # no history

    def git(*arguments):
        named = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run([*named, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "main")
    assert trees.fork_point() is None  # nothing known of main
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    main = git("rev-parse", "HEAD")
    assert trees.fork_point() is None  # this is it
    (tmp_path / "noxfile.py").write_text("# changed")
    assert trees.fork_point() == main
    git("commit", "-qam", "branch")
    assert trees.fork_point() == main


@pytest.mark.parametrize("has_filters", [True, False], ids=["python 3.11.4", "python 3.11.2, which Debian 12 has"])
def test_commit_is_unpacked_as_it_was(base, tmp_path, monkeypatch, has_filters):
    if not has_filters:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    monkeypatch.setattr(trees, "REPO", base)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "base"]):
        subprocess.run(["git", "-C", str(base), *command], check=True)
    (base / "src/treemla/__init__.py").write_text("VERSION = 'changed since'\n")
    (tmp_path / "scratch").mkdir()
    unpacked = trees.find("HEAD", tmp_path / "scratch")
    assert (unpacked / "src/treemla/__init__.py").read_text() == "VERSION = 'base'\n"


def test_baseline_that_only_the_base_has_was_removed(tmp_path):
    for tree, names in (("base", ("kept", "gone")), ("head", ("kept", "new"))):
        for name in names:
            path = tmp_path / tree / f"perf_baselines/kernel/{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    assert trees.removed_baselines(tmp_path / "base", tmp_path / "head") == ["perf_baselines/kernel/gone.json"]
    assert trees.removed_baselines(tmp_path / "no baselines", tmp_path / "head") == []
