"""The package as a whole: examples in docstrings, pictures, the choice of the library."""

import doctest
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import build

import violin

MODULES = ["violin", *(f"violin.{module.name}" for module in pkgutil.iter_modules(violin.__path__))]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith((".plot", "._built_with"))])
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.failed == 0
    if name in ("violin", "violin.ops", "violin.curves", "violin.mask", "violin.layers"):
        assert result.attempted > 0


def test_public_functions_have_docstrings():
    for name in violin.__all__:
        thing = getattr(violin, name)
        if callable(thing):
            assert thing.__doc__, name


def imported(code="import violin", **environment):
    paths = os.pathsep.join([str(Path(violin.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_import_says_what_is_wrong():
    missing = imported(VIOLIN_OPS_LIBRARY="/nowhere/libviolin_ops.so")
    assert missing.returncode and "ImportError: violin's operator library is not there" in missing.stderr
    assert "/nowhere/libviolin_ops.so" in missing.stderr
    broken = imported(VIOLIN_OPS_LIBRARY=__file__)
    assert broken.returncode and "cannot be loaded with torch" in broken.stderr
    old = imported("import torch; torch.__version__ = '2.3.1'; import violin")
    assert old.returncode and "violin needs torch 2.11 or later; this interpreter has 2.3.1" in old.stderr


def test_a_wheel_for_another_torch_is_refused():
    from violin import _library

    with pytest.raises(ImportError, match=r"built with torch 2\.99\.0 .* build it again"):
        _library._check_torch("2.99.0")
    _library._check_torch(torch.__version__)


def test_version_is_that_of_the_project():
    text = (Path(__file__).parent.parent.parent / "CMakeLists.txt").read_text()
    assert f"project(violin VERSION {violin.__version__} " in text


def test_pictures(tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    matplotlib.use("Agg")
    model = violin.plug(build("torchvision"), init="spread")
    mask = next(violin.masks(model))[1]
    figures = {
        "curves": violin.plot.curves(grid=(5, 7)),
        "mask": violin.plot.mask(mask, (4, 4), at=(1, 2), prefix=1),
        "decays": violin.plot.decays(model),
    }
    for name, figure in figures.items():
        figure.savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    assert len(figures["curves"].axes) == 8 and len(figures["decays"].axes) == 3
    assert [axis.get_title() for axis in figures["decays"].axes[:2]] == ["block 0", "block 1"]
    tables = mask.mask((4, 4), 1)
    for options, message in [
        ({"source": tables, "grid": (4, 4)}, r"the tables are \[3, 17, 17\]; expected \[heads, 16, 16\].*and prefix=0"),
        ({"source": tables, "grid": (3, 4), "prefix": 1}, r"expected \[heads, 13, 13\] for a grid of 3x4 and prefix=1"),
        ({"source": tables[0], "grid": (4, 4), "prefix": 1}, r"the tables are \[17, 17\]"),
        ({"source": model, "grid": (4, 4)}, "source is a TorchvisionTransformer; expected a ViolinMask"),
        ({"source": mask, "grid": (4, 4), "at": (4, 0)}, r"at is \(4, 0\); expected \(row, column\)"),
    ]:
        with pytest.raises(violin.Error, match=message):
            violin.plot.mask(**options)
    with pytest.raises(violin.Error, match="manhattan is a distance"):
        violin.plot.curves("manhattan", (3, 3))
    with pytest.raises(violin.Error, match="no masks"):
        violin.plot.decays(build("torchvision"))
