"""Space-filling curves over a grid of patches.

>>> from violin import curves
>>> curves.ranks("snake", (2, 3)).view(2, 3)
tensor([[0, 1, 2],
        [5, 4, 3]], dtype=torch.int32)
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import _library  # noqa: F401  the operators
from ._streams import captured, complete, lend
from .errors import Error

_PUBLISHED = ("snake", "hilbert", "peano", "zigzag")

#: Sets of curves; the order fixes the index of their parameters.
SETS: dict[str, tuple[str, ...]] = {
    "violin": tuple(name + suffix for name in _PUBLISHED for suffix in ("", "_T")),
    "normal": _PUBLISHED,
    "transposed": tuple(name + "_T" for name in _PUBLISHED),
}

#: Every plain name. ``random:7`` is a random order with a seed, ``morton`` another name of ``peano``.
NAMES: tuple[str, ...] = (*SETS["violin"], "z", "z_T", "random", "manhattan")

Curves = str | Sequence[str]

_KEPT = 64  # ranks of so many grids and curves


def text(curves: Curves) -> str:
    """Curves as the operators take them: separated by commas."""
    if isinstance(curves, str):
        return curves
    if not isinstance(curves, Sequence) or not all(isinstance(name, str) for name in curves):
        raise Error(f"curves is {curves!r}; expected a set, a name or a list of names, or \"\" for none")
    return ",".join(curves)


def names(curves: Curves) -> list[str]:
    """The curves that a set, a comma-separated list or a sequence of names stands for.

    >>> names("normal")
    ['snake', 'hilbert', 'peano', 'zigzag']
    >>> names("hilbert, morton_T")
    ['hilbert', 'peano_T']
    """
    found: list[str] = []
    for part in (part.strip() for part in text(curves).split(",")):
        if part:
            found += SETS.get(part, (part.replace("morton", "peano"),))
    if found:
        coordinates(",".join(found), 1, 1, torch.device("cpu"))  # an unknown name is an error here, not later
    return found


def ranks(curve: Curves, grid: Sequence[int]) -> Tensor:
    """Where each patch comes along a curve, int32, patches row by row.

    One curve: [N]; ``manhattan``, whose distance is a sum over two axes: [2,N]. A set, a list or several names: [C,A,N],
    ready for :func:`violin.ops.decay_mask`. ``grid`` is (height, width) or (frames, height, width).

    >>> ranks("hilbert", (2, 2)).tolist()
    [0, 3, 1, 2]
    >>> ranks("violin", (14, 10)).shape
    torch.Size([8, 1, 140])
    """
    try:
        result = torch.ops.violin.curve_ranks(text(curve), list(map(operator.index, grid)))
    except TypeError:
        raise Error(f"grid is {grid!r}; expected (height, width) or (frames, height, width), whole numbers") from None
    except ValueError as error:
        raise Error(str(error)) from None
    single = isinstance(curve, str) and "," not in curve and curve not in SETS
    return result.squeeze(0).squeeze(0) if single else result


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Makes ordinary tensors whatever the caller is in, for those that are kept and saved for a backward pass."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


_Made = tuple[Tensor, Any]  # with the stream that made it


@functools.lru_cache(maxsize=_KEPT)
def _coordinates(curves: str, height: int, width: int, device: torch.device) -> _Made:
    with plainly():
        try:
            made = torch.ops.violin.curve_ranks(curves, [height, width]).to(device)
        except ValueError as error:
            raise Error(str(error)) from None
        return made, complete([made])


@functools.lru_cache(maxsize=_KEPT)
def _longest(curves: str, height: int, width: int, device: torch.device) -> _Made:
    """Told from the names: a file of a few bytes may ask for the unit of a rate on a grid beyond all memory."""
    row, path = max(1, height - 1, width - 1), max(1, height * width - 1)
    longest = [row if name.endswith("manhattan") else path for name in curves.split(",")]
    with plainly():
        made = torch.tensor(longest, device="cpu").to(device)
        return made, complete([made])


_MAKERS: dict[str, Callable[..., _Made]] = {"ranks": _coordinates, "longest": _longest}
_in_graphs: dict[tuple[Any, ...], Tensor] = {}  # what CUDA graphs read stays where it is


def _constants(number: int) -> dict[str, Callable[..., Tensor]]:
    def made(name: str) -> Callable[..., Tensor]:
        def constant(kind: str, *key: Any) -> Tensor:
            return _MAKERS[kind](*key)[0]

        constant.__code__ = constant.__code__.replace(co_name=name)
        return torch.compiler.assume_constant_result(constant)

    return {name: made(name) for name in (f"violin_constant_{i}" for i in range(number))}


#: The same function under many names: a compiled graph knows its constants by the name of the function that made them,
#: and may hold those of several grids and curves.
_CONSTANTS = _constants(512)
_names: dict[tuple[Any, ...], str] = {}


@torch.compiler.assume_constant_result
def _name(*key: Any) -> str:
    return _names.setdefault(key, f"violin_constant_{len(_names) % len(_CONSTANTS)}")


def _kept(*key: Any) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        return _CONSTANTS[_name(*key)](*key)
    made, stream = _MAKERS[key[0]](*key[1:])
    lend([made], stream)
    if captured():
        _in_graphs[key] = made
    return made


def coordinates(curves: str, height: int, width: int, device: torch.device) -> Tensor:
    """Ranks [C,A,N] on a device, kept: layers of equal grid share them, and compiled code holds them as a constant."""
    return _kept("ranks", curves, height, width, device)


def longest(curves: str, height: int, width: int, device: torch.device) -> Tensor:
    """The longest distance along each curve on a grid, at least 1, whole numbers [C], kept in the same way."""
    return _kept("longest", curves, height, width, device)
