"""Two source trees under one harness: the library of either, measured by the measuring code of this one.

A tree is a checkout or an unpacked build. What times both is this checkout's treemla.gate, so that a change of the
measuring code is no change of the measured.
"""

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

from treemla.gate.exits import BaselineMissing
from treemla.gate.fingerprint import REPO, git_commit, said

GATE = Path(__file__).parent


def library(tree: Path) -> Path:
    """The package folder in a checkout or an unpacked wheel; BaselineMissing where there is none."""
    for folder in (tree / "src" / "treemla", tree / "treemla"):
        if (folder / "__init__.py").is_file():
            return folder
    raise BaselineMissing(f"{tree}: expected src/treemla or treemla in it: a checkout or an unpacked wheel")


def find(base: str, scratch: Path) -> Path:
    """The tree that `base` names: a folder, or a commit of this checkout, which is unpacked into `scratch`."""
    if Path(base).is_dir():
        library(Path(base))
        return Path(base).absolute()
    command = ["git", "-C", str(REPO), "archive", "--format=tar", f"{base}^{{commit}}"]
    try:
        packed = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
        raise BaselineMissing(
            f"--base {base}: neither a folder nor a commit of this checkout ({said}); "
            "where there is no git history, give the folder of an unpacked base"
        ) from None
    unpacked = scratch / "unpacked"
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python has it since 3.11.4
        archive.extractall(unpacked)
    library(unpacked)
    return unpacked


def fork_point() -> str | None:
    """The commit at which this checkout left origin/main; None where it is that commit, or has no such history."""
    commit = said("git", "-C", str(REPO), "merge-base", "HEAD", "origin/main")
    return None if commit == git_commit() else commit


def join(tree: Path, joined: Path) -> Path:
    """Make the folder `joined` a checkout of `tree` with this treemla.gate, by links; what to put on sys.path."""
    package = library(tree)
    (joined / "src" / "treemla").mkdir(parents=True)
    for entry in package.iterdir():
        if entry.name not in {"gate", "__pycache__"}:
            (joined / "src" / "treemla" / entry.name).symlink_to(entry.absolute())
    (joined / "src" / "treemla" / "gate").symlink_to(GATE)
    if (tree / "csrc").is_dir():
        (joined / "csrc").symlink_to((tree / "csrc").absolute())
    return joined / "src"


def removed_baselines(base: Path, head: Path) -> list[str]:
    """Baseline files that the base has and the head has not: a gate without its baseline would pass anything."""
    return [
        str(path.relative_to(base))
        for path in sorted((base / "perf_baselines").rglob("*.json"))
        if not (head / path.relative_to(base)).is_file()
    ]
