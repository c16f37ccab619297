"""The package from the source tree unless another is installed, and timm without torchvision."""

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
if importlib.util.find_spec("violin") is None:
    sys.path.insert(0, str(ROOT / "python"))


class _Anything(types.ModuleType):
    """A module in which every name is an empty class: timm's data pipelines want torchvision, its models do not."""

    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        modes = {mode: mode.lower() for mode in ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")}
        value = enum.Enum(name, modes) if name == "InterpolationMode" else type(name, (), {})
        setattr(self, name, value)
        return value


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Anything(spec.name)

    def exec_module(self, module):
        pass


if importlib.util.find_spec("torchvision") is None:
    sys.meta_path.append(_StandIn())


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def timm():
    return pytest.importorskip("timm", reason="timm is not installed (pip install --no-deps timm)")


@pytest.fixture
def golden():
    return ROOT / "tests" / "golden"
