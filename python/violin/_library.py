"""Finds and loads the operator library, once per process.

In this order: operators that are registered already (a C++ program may have done it), the file that VIOLIN_OPS_LIBRARY
names, the library that the wheel ships, and the build folder of the source tree that the package is imported from.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

_OLDEST_TORCH = (2, 11)
_FILE = "libviolin_ops.so"


def _number(version: str) -> tuple[int, int]:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()))


def _check_torch(built_with: str | None) -> None:
    """The library is C++ code against torch's headers: it serves the minor version that it was built with."""
    if _number(torch.__version__) < _OLDEST_TORCH:
        raise ImportError(
            f"violin needs torch {_OLDEST_TORCH[0]}.{_OLDEST_TORCH[1]} or later; this interpreter has {torch.__version__}"
        )
    if built_with and _number(built_with) != _number(torch.__version__):
        raise ImportError(
            f"this violin was built with torch {built_with} and this interpreter has {torch.__version__}; build it "
            "again: pip install --no-build-isolation --force-reinstall --no-deps <the violin source folder>"
        )


def _candidates() -> list[tuple[Path, str | None]]:
    """Files to try, with the torch version that each was built with where that is known."""
    named = os.environ.get("VIOLIN_OPS_LIBRARY")
    if named:
        return [(Path(named), None)]
    here = Path(__file__).resolve().parent
    found: list[tuple[Path, str | None]] = []
    if (here / _FILE).exists():
        from ._built_with import TORCH_VERSION  # type: ignore[import-not-found]  # written by the build

        found.append((here / _FILE, TORCH_VERSION))
    found.append((here.parent.parent / "build" / _FILE, None))
    return found


def load() -> str:
    """Registers torch.ops.violin.* and returns the path of the library that did it."""
    _check_torch(None)
    if hasattr(torch.ops.violin, "attention_qkv"):
        return "(loaded before)"
    candidates = _candidates()
    for path, built_with in candidates:
        if not path.exists():
            continue
        _check_torch(built_with)
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            raise ImportError(
                f"{path} cannot be loaded with torch {torch.__version__} ({error}); build it with this torch: "
                "make build, or pip install --no-build-isolation ."
            ) from error
        return str(path)
    tried = ", ".join(str(path) for path, _ in candidates)
    raise ImportError(
        f"violin's operator library is not there (tried {tried}); run make build in the source folder, install the "
        "package, or set VIOLIN_OPS_LIBRARY to the file"
    )


PATH = load()
