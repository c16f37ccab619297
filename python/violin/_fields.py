"""The JSON description of a model, as files hold it: fields, what they are without being said, and what they may be.

The same that violin/nn/config.cpp takes and refuses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .config import MaskConfig
from .errors import Error

_LARGEST_SIDE = 1 << 16
_LARGEST_INTEGER = 10**9

_Check = Callable[[str, Any], Any]


def _wrong(field: str, value: Any, expected: str) -> Error:
    shown = repr(value)
    return Error(f"{field} is {shown if len(shown) <= 80 else shown[:77] + '…'}; expected {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(field, value, "true or false")
    return value


def _integer(least: int, most: int) -> _Check:
    def check(field: str, value: Any) -> int:
        if not (_is_number(value) and isinstance(value, int) and least <= value <= most):
            raise _wrong(field, value, f"a whole number from {least} to {most}")
        return value

    return check


def _number(good: Callable[[float], bool], expected: str) -> _Check:
    def check(field: str, value: Any) -> float:
        # A whole number of any length does not become a float.
        if not (_is_number(value) and abs(value) < _LARGEST_INTEGER and good(value)):
            raise _wrong(field, value, expected)
        return value

    return check


def _one_of(*choices: str) -> _Check:
    def check(field: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise _wrong(field, value, "one of " + ", ".join(choice or '""' for choice in choices))
        return value

    return check


def _or_null(inner: _Check) -> _Check:
    return lambda field, value: None if value is None else inner(field, value)


def _size(field: str, value: Any) -> tuple[int, int]:
    """224, [160, 224] or "160x224"."""
    sides = value if isinstance(value, list) else [value, value]
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}(x\d{1,9})?", value, re.ASCII):
        sides = [int(side) for side in (value.split("x") * 2)[:2]]
    known = all(_is_number(side) and abs(side) < _LARGEST_INTEGER and side % 1 == 0 for side in sides)
    if len(sides) != 2 or not known:
        raise _wrong(field, value, "a whole number or [height, width]")
    height, width = int(sides[0]), int(sides[1])
    if not (1 <= height <= _LARGEST_SIDE and 1 <= width <= _LARGEST_SIDE):
        raise _wrong(field, value, f"whole numbers from 1 to {_LARGEST_SIDE}")
    return height, width


def _object(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(field, value, "an object {…}")
    return value


def _mask(field: str, value: Any) -> MaskConfig:
    return MaskConfig.from_json(value)


_SHARE = _number(lambda value: 0 <= value < 1, "a share from 0 up to, but not, 1")

#: Of each field what it is where a description leaves it out, and its check.
_FIELDS: dict[str, tuple[Any, _Check]] = {
    "img_size": ((224, 224), _size),
    "patch_size": ((16, 16), _size),
    "in_chans": (3, _integer(1, 1024)),
    "num_classes": (1000, _integer(0, 1 << 24)),
    "embed_dim": (768, _integer(1, 1 << 16)),
    "depth": (12, _integer(1, 1000)),
    "num_heads": (12, _integer(1, 4096)),
    "mlp_ratio": (4, _number(lambda value: 0 < value < 1000, "a number above 0 and below 1000")),
    "qkv_bias": (True, _flag),
    "class_token": (True, _flag),
    "distilled": (False, _flag),
    "reg_tokens": (0, _integer(0, 4096)),
    "pos_embed": ("learn", _one_of("learn", "none")),
    "no_embed_class": (False, _flag),
    "global_pool": ("token", _one_of("token", "avg", "")),
    "fc_norm": (None, _or_null(_flag)),
    "init_values": (None, _or_null(_number(lambda value: True, "a number or null"))),
    "drop_rate": (0.0, _SHARE),
    "pos_drop_rate": (0.0, _SHARE),
    "proj_drop_rate": (0.0, _SHARE),
    "attn_drop_rate": (0.0, _SHARE),
    "drop_path_rate": (0.0, _SHARE),
    "norm_eps": (1e-6, _number(lambda value: value > 0, "a number above 0")),
    "pos_resample": ("timm", _one_of("timm", "dino", "deit")),
    "violin": (None, _or_null(_mask)),
    "adapters": (None, _or_null(_object)),
}


def checked(description: Any) -> dict[str, Any]:
    """Every field of a description, those included that it leaves out: sizes are pairs, ``violin`` is a MaskConfig."""
    _object("the description", description)
    unknown = sorted(set(description) - set(_FIELDS))
    if unknown:
        raise Error(f"{unknown[0]!r} is not a field of a model; there are {', '.join(_FIELDS)}")
    result = {
        field: check(field, description[field]) if field in description else default
        for field, (default, check) in _FIELDS.items()
    }
    if result["fc_norm"] is None:
        result["fc_norm"] = result["global_pool"] == "avg"
    _agree(result)
    return result


def _agree(result: Mapping[str, Any]) -> None:
    """Fields that are good one by one must be so together."""
    size, patch = result["img_size"], result["patch_size"]
    if size[0] < patch[0] or size[1] < patch[1]:
        raise _wrong("img_size", list(size), f"at least the patch size, {list(patch)}")
    if result["embed_dim"] % result["num_heads"]:
        raise _wrong("num_heads", result["num_heads"], f"a divisor of embed_dim, {result['embed_dim']}")
    if result["distilled"] and not (result["class_token"] and result["global_pool"] == "token"):
        raise _wrong("distilled", True, "a class token beside it, and global_pool token")
    if result["global_pool"] == "token" and not result["class_token"]:
        raise _wrong("global_pool", "token", 'avg (or "") where class_token is false')
    mask = result["violin"]
    for field, count in (("blocks", result["depth"]), ("heads", result["num_heads"])):
        listed = (getattr(mask, field) if mask is not None else None) or ()
        if not all(0 <= number < count for number in listed):
            raise _wrong(f"violin.{field}", list(listed), f"numbers from 0 to {count - 1}")
