"""Files that a command was asked to write: whether it can is known before it does anything else."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from treemla.gate.baseline import ROOT


def expect_writable(outputs: Mapping[str, Path], inputs: Iterable[Path], trees: Iterable[Path] = ()) -> None:
    """Make the folders of `outputs`, {argument: path}, and open each, leaving what it holds.

    ValueError names the argument whose path cannot be written, is another's or an input, or lies in perf_baselines/ or
    in one of the source `trees` outside its build/, from which nothing is read.
    """
    folders = [Path(os.path.realpath(tree)) for tree in trees]
    taken = {_identity(path): "an input of this command" for path in inputs}
    for name, path in outputs.items():
        place = Path(os.path.realpath(path))
        if place.is_relative_to(ROOT):
            raise ValueError(f"{name}: {path} lies among the stored baselines")
        for folder in folders:
            if place.is_relative_to(folder) and not place.is_relative_to(folder / "build"):
                raise ValueError(f"{name}: {path} lies in {folder}, an input of this command")
        if use := taken.get(_identity(path)):
            raise ValueError(f"{name}: {path} is {use}")
        taken[_identity(path)] = f"what {name} writes"
        try:
            existed = os.path.lexists(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
            if not existed:
                path.unlink(missing_ok=True)  # another command may try the same path
        except OSError as error:
            raise ValueError(f"{name}: {path} cannot be written: {error}") from error


def _identity(path: Path) -> object:
    """The same for every name of a file, by links too; of a file that is not there, where it would be."""
    try:
        held = path.stat()
    except OSError:
        return os.path.realpath(path)
    return held.st_dev, held.st_ino
