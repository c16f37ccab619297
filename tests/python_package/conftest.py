"""The package from the source tree unless another is installed, and timm without torchvision."""

import importlib.util
import os
import sys
from pathlib import Path

# Virtual machines exist that announce AMX and refuse it: torch's own 16-bit products end the process there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
installed = importlib.util.find_spec("violin")
if installed is None or installed.origin is None:  # the folder of the C++ library is no package
    sys.path.insert(0, str(ROOT / "python"))


sys.path.insert(0, str(ROOT / "tools"))
sys.path.append(str(ROOT / "tests" / "python"))
import without_torchvision
from compilers import skip_inductor

without_torchvision.install()


def pytest_collection_modifyitems(items):
    skip_inductor(items)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def timm():
    return pytest.importorskip("timm", reason="timm is not installed (pip install --no-deps timm)")


@pytest.fixture
def golden():
    return ROOT / "tests" / "golden"
