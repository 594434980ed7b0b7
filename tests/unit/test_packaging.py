"""What a user installs: a wheel with cubins, or one that says it has none; a package that imports without a GPU's software."""

import ast
import os
import platform
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import treemla
from treemla import nvcc, tiles

REPO = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())


def build_wheel(out, **environment):
    """Build with what is installed here; the hook looks for nvcc on PATH and in this environment."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(
        command, cwd=REPO, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel, done.stdout + done.stderr


def test_a_wheel_carries_each_targets_cubin_its_log_and_the_hash_of_its_source(tmp_path):
    wheel, _ = build_wheel(tmp_path)
    assert wheel.name == f"treemla-0.1.0-py3-none-manylinux_2_28_{platform.machine()}.whl"
    with zipfile.ZipFile(wheel) as held:
        for arch in tiles.TARGETS:
            assert held.read(f"treemla/_cubins/{arch}.cubin") == nvcc.build(REPO / "csrc", arch).read_bytes()
            assert b"ptxas info" in held.read(f"treemla/_cubins/{arch}.ptxas.txt")
            assert held.read(f"treemla/_cubins/{arch}.source").decode().strip() == nvcc.source_hash(REPO / "csrc", arch)


def test_a_wheel_made_without_a_compiler_has_no_cubins_and_says_so(tmp_path):
    no_compiler = tmp_path / "bin"
    no_compiler.mkdir()
    wheel, said = build_wheel(tmp_path, PATH=str(no_compiler), CUDA_HOME="", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "THIS WHEEL HAS NO CUBINS" in said
    assert wheel.name == "treemla-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
    assert not [name for name in names if "_cubins" in name]
    for needed in ("treemla/py.typed", "treemla/gate/result.schema.json", "treemla-0.1.0.dist-info/licenses/LICENSE"):
        assert needed in names


def test_the_build_hook_reads_the_targets_that_the_package_has():
    from hatch_build import target_archs

    assert target_archs(REPO / "src/treemla/tiles.py") == list(tiles.TARGETS)


def test_the_package_imports_without_cuda_bindings_triton_sglang_or_matplotlib():
    code = """
import sys
for name in ("cuda", "triton", "sglang", "matplotlib", "jsonschema", "pynvml"):
    sys.modules[name] = None
import treemla, treemla.gate.cli, treemla.gate.bench
print(*treemla.__all__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == treemla.__all__


def test_what_the_build_hook_loads_by_path_needs_the_standard_library_alone():
    imported = set()
    for node in ast.walk(ast.parse(Path(nvcc.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported <= sys.stdlib_module_names


def test_the_version_is_said_once_and_repeated_right():
    assert treemla.__version__ == PYPROJECT["project"]["version"]


def test_the_compiler_that_builds_the_wheel_is_the_one_that_tests_build_with():
    asked = {line.split(";")[0].strip() for line in PYPROJECT["build-system"]["requires"] if line.startswith("nvidia")}
    assert asked <= set(PYPROJECT["dependency-groups"]["static"])
    for requirement in asked:
        assert f"'{requirement}'" in nvcc.REMEDY


def test_the_readmes_example_runs_on_a_cpu():
    text = (REPO / "README.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == text.split("```text\n")[1].split("```")[0].strip()


def test_gpu_perf_measures_and_then_gates_with_its_arguments():
    (perf,) = [n for n in ast.parse((REPO / "noxfile.py").read_text()).body if getattr(n, "name", "") == "gpu_perf"]
    ran = [ast.unparse(statement.value) for statement in perf.body[1:]]
    assert ran == ["run(session, 'treemla', 'bench')", "run(session, 'treemla', 'gate', *session.posargs)"]


@pytest.mark.parametrize(
    "session",
    ["check", "lint", "unit", "static", "sglang", "gpu-parity", "gpu-graph", "gpu-sanitize", "gpu-perf", "gpu-e2e"],
)
def test_each_layer_is_a_session(session):
    nox = REPO / "noxfile.py"
    names = set()
    for node in ast.parse(nox.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                named = {k.arg: ast.literal_eval(k.value) for k in getattr(decorator, "keywords", [])}
                names.add(named.get("name", node.name))
    assert session in names
