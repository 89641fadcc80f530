"""Importing a package changes nothing: no registry entry, no torch default, no warnings filter.

Each check runs in a fresh interpreter, since this one has imported everything already.
"""

import subprocess
import sys

import pytest
from policy.source_tree import ROOT

BOTTOM_UP = ("oval_core", "oval_mm", "oval_spec", "oval_adapters")

PACKAGES_CHANGE_NOTHING = """
import importlib, os, pkgutil, sys, warnings
import torch
from transformers import AttentionInterface, AttentionMaskInterface

def registries():
    return {
        "attention functions": dict(AttentionInterface._global_mapping),
        "mask functions": dict(AttentionMaskInterface._global_mapping),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
    }

def whole_state():
    return registries() | {"warnings": list(warnings.filters), "environment": dict(os.environ)}

def compare(name, before, after):
    for key in before:
        if before[key] != after[key]:
            sys.exit(f"importing {name} changed {key}: {before[key]} -> {after[key]}")

for name in sys.argv[1:]:
    before = whole_state()
    importlib.import_module(name)
    compare(name, before, whole_state())

# Inner modules may import parts of transformers that set filters of their own: registries only.
# A module of an optional dependency (a Triton kernel, say) may be missing that, never one of ours.
for name in sys.argv[1:]:
    for info in pkgutil.walk_packages(sys.modules[name].__path__, name + "."):
        if info.name.endswith(".__main__"):
            continue
        before = registries()
        try:
            importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("oval_"):
                raise
        compare(info.name, before, registries())
"""

PACKAGES_WORK_WITHOUT_TRANSFORMERS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    upper = sorted(m for m in sys.modules if m.split(".")[0] in ("transformers", "oval_adapters"))
    if upper:
        sys.exit(f"importing {name} also imported {upper[:5]}")
"""


def run_python(code: str, *names: str) -> None:
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_importing_changes_nothing() -> None:
    run_python(PACKAGES_CHANGE_NOTHING, *BOTTOM_UP)


@pytest.mark.slow
def test_lower_packages_import_without_transformers() -> None:
    run_python(PACKAGES_WORK_WITHOUT_TRANSFORMERS, "oval_core", "oval_mm", "oval_spec")
