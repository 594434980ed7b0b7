"""SGLang finds the plug-in, and its command line takes the name."""

import argparse
import logging
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from sglang.srt import server_args
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

from treemla import sglang as plugin
from treemla.sglang import compat

NAMES = (plugin.BACKEND, plugin.SHADOW)
FLAGS = ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend")


def test_the_entry_point_is_installed():
    (found,) = entry_points(group=compat.PLUGINS, name="treemla")
    assert found.load() is plugin.register


def test_load_plugins_registers_the_backend():
    assert ATTENTION_BACKENDS["treemla"] is plugin.make_backend
    assert ATTENTION_BACKENDS["treemla-shadow"] is plugin.make_shadow
    assert all(compat.is_registered(name) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flag", FLAGS)
def test_the_command_line_takes_the_name(flag, name):
    parser = argparse.ArgumentParser(exit_on_error=False)
    server_args.ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(["--model-path", "model", flag, name])
    assert getattr(parsed, flag.removeprefix("--").replace("-", "_")) == name
    with pytest.raises(argparse.ArgumentError, match=name):  # among the choices that the message lists
        parser.parse_args(["--model-path", "model", flag, "no such backend"])


def test_deterministic_inference_takes_the_name():
    assert set(NAMES) <= set(server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES)


def test_registering_again_changes_nothing():
    before = list(server_args.ATTENTION_BACKEND_CHOICES), dict(ATTENTION_BACKENDS)
    plugin.register()
    assert (list(server_args.ATTENTION_BACKEND_CHOICES), dict(ATTENTION_BACKENDS)) == before
    assert server_args.ATTENTION_BACKEND_CHOICES.count("treemla") == 1


def test_a_failure_is_one_error_line_with_the_remedy(monkeypatch, caplog):
    monkeypatch.delattr(server_args, "ATTENTION_BACKEND_CHOICES")
    with pytest.raises(AttributeError), caplog.at_level(logging.ERROR):
        plugin.register()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "treemla.sglang"]
    assert "ATTENTION_BACKEND_CHOICES" in line and "python -m treemla doctor" in line


def test_registering_imports_no_kernels():
    script = (
        "import torch, sys; of_torch = set(sys.modules);"  # which imports cuda.bindings where it finds them
        "import torchvision_shim, treemla.sglang; treemla.sglang.register();"
        "heavy = [name for name in set(sys.modules) - of_torch if name.endswith('triton_backend') or"
        " name.startswith(('treemla.sglang.backend', 'cuda.core', 'cuda.bindings'))];"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
