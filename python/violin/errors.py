"""The one exception type of the package, and checks that raise it."""

import operator
from typing import Any

import torch
from torch import Tensor


class Error(ValueError):
    """A message for a person, naming the thing and the remedy."""


def first_line(error: BaseException) -> str:
    """What an exception says, for a message of one line."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def whole(name: str, value: Any, least: int = 0) -> int:
    """A whole number that a caller gave."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise Error(f"{name} is {value!r}; expected a whole number from {least} on")
    return number


def numbers(name: str, values: Any) -> list[int]:
    """Numbers of blocks or heads that a caller gave, in their order."""
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise Error(f"{name} is {values!r}; expected a list of numbers, or None for all") from None


def _pair(name: str, value: Any, given: Any, expected: str) -> tuple[int, int]:
    try:
        height, width = map(operator.index, value)
    except (TypeError, ValueError):
        height = width = 0
    if height < 1 or width < 1:
        raise Error(f"{name} is {given!r}; expected {expected}")
    return height, width


def sides(name: str, value: Any) -> tuple[int, int]:
    """Height and width that a caller gave."""
    return _pair(name, value, value, "(height, width), whole numbers from 1 on")


def pixels(name: str, value: Any) -> tuple[int, int]:
    """Height and width of images that a caller gave: one number is a square."""
    try:
        pair: Any = (operator.index(value),) * 2
    except TypeError:
        pair = value
    return _pair(name, pair, value, "a number or (height, width), whole and from 1 on")


def tensor(name: str, value: Any) -> None:
    """A tensor that a caller gave. Compiled code traces this, and nothing of it is left there."""
    if not isinstance(value, Tensor):
        if not hasattr(type(value), "__torch_function__"):  # stand-ins of torch's tracers have it
            raise Error(f"{name} is {'None' if value is None else 'a ' + type(value).__name__}; expected a tensor")
    elif value.is_nested or value.layout != torch.strided:
        raise Error(f"{name} is a {'nested' if value.is_nested else value.layout} tensor; expected a plain one")
