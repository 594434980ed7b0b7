"""Command line and fixtures of all suites: which device, which cases, how hypothesis runs."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import gpus

NO_DEVICE = 4  # exit code: the environment cannot run what was asked


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where the parity suites run")
    parser.addoption(
        "--case", action="append", metavar="ID", help="run the parity suites on this case id alone; repeatable"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before anything imports it
    else:
        gpus.choose()

    import hypothesis
    import torch

    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        pytest.exit("--device cuda: expected a CUDA GPU, got none that torch can use", returncode=NO_DEVICE)
    if config.getoption("--device") == "cpu":
        torch.set_num_threads(1)  # the tensors are small, and xdist's workers share the cores
    hypothesis.settings.register_profile("treemla", deadline=None, derandomize=True, print_blob=True)
    hypothesis.settings.load_profile("treemla")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `case` runs over the list its module names for the device: CASES = {"cpu": .., "cuda": ..}."""
    if "case" not in metafunc.fixturenames or not hasattr(metafunc.module, "CASES"):
        return
    from cases import Case

    asked = metafunc.config.getoption("--case")
    listed = (
        [Case.from_id(name) for name in asked]
        if asked
        else metafunc.module.CASES[metafunc.config.getoption("--device")]
    )
    metafunc.parametrize("case", listed, ids=lambda case: case.id)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --case, only the tests that take a case."""
    if config.getoption("--case"):
        other = [item for item in items if "case" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in other]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest):
    """A GPU is this process's until its session ends, beside other suites but no measurement."""
    import torch

    if request.config.getoption("--device") == "cpu":
        yield torch.device("cpu")
        return
    from treemla.gate.exits import InvalidEnvironment

    try:
        with gpus.shared_lease():
            yield torch.device("cuda", torch.cuda.current_device())
    except InvalidEnvironment as error:
        pytest.exit(str(error), returncode=NO_DEVICE)
