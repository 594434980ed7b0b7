"""Build hook: compiles csrc/ to one cubin per target and puts them into the wheel, with the compiler's log beside each.

Where nothing can be compiled (no nvcc for this platform, no host compiler) the wheel is made without cubins: the
portable path works, and a call on a GPU says what is missing. Source that nvcc rejects fails the build. An editable
install compiles nothing: a checkout builds into the cache when a kernel is first asked for.
"""

import ast
import importlib.util
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CubinHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        package = Path(self.root, "src/treemla")
        nvcc = load_nvcc(package)
        csrc = Path(self.root, "csrc")
        try:
            for arch in target_archs(package / "tiles.py"):
                self._include(nvcc, nvcc.build(csrc, arch), nvcc.source_hash(csrc, arch), build_data)
        except nvcc.NvccMissing as error:
            build_data["force_include"].clear()
            self.app.display_warning(f"treemla: THIS WHEEL HAS NO CUBINS AND WILL NOT RUN ON A GPU\n{error}")
            return
        build_data["pure_python"] = False  # named apart from a wheel without cubins
        build_data["tag"] = f"py3-none-manylinux_2_28_{platform.machine()}"

    def _include(self, nvcc: ModuleType, cubin: Path, source_hash: str, build_data: dict[str, Any]) -> None:
        record = Path(self.directory, f"{cubin.stem}.source")
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(source_hash + "\n")
        for path in (cubin, nvcc.log_path(cubin), record):
            build_data["force_include"][str(path)] = f"treemla/_cubins/{path.name}"


def load_nvcc(package: Path) -> ModuleType:
    """treemla/nvcc.py by path: its package imports torch, which a build environment lacks."""
    spec = importlib.util.spec_from_file_location("treemla_nvcc", package / "nvcc.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def target_archs(tiles: Path) -> list[str]:
    """The keys of TARGETS in tiles.py, read without importing it, so that the targets are named once."""
    for node in ast.parse(tiles.read_text()).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Dict)
            and ast.unparse(node.targets[0]) == "TARGETS"
        ):
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise RuntimeError(f"{tiles}: expected a dictionary literal TARGETS")
