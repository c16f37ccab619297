"""Reading and writing safetensors files: a header of JSON, then raw tensors. Enough for weights, with every offset checked.

The file is written beside its place and renamed, so a kill leaves the previous one whole; equal content gives equal bytes.
"""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import Error

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000
_MAX_DIMENSIONS, _MAX_BYTES = 64, 2**63 - 1  # torch's


def begins(start: bytes) -> bool:
    """Whether a file that begins so looks like one of these. The header's length is below 2**32, or a pickle might begin
    so too."""
    return start[8:9] == b"{" and start[4:8] == bytes(4)


def _header(data: memoryview, path: Path) -> tuple[dict[str, Any], int]:
    def wrong(what: str) -> Error:
        return Error(f"{path} is no safetensors file: {what}")

    if len(data) < 8:
        raise wrong("it is shorter than 8 bytes")
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(_MAX_HEADER, len(data) - 8):
        raise wrong("its header is longer than the file")
    try:
        header = json.loads(bytes(data[8 : 8 + length]).decode())
    except (ValueError, RecursionError) as error:  # of bytes, of JSON, of numbers beyond all bounds
        raise wrong(f"its header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise wrong("its header is no JSON object")
    return header, 8 + length


def load_file(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file."""
    path = Path(path)
    try:
        data = bytearray(path.read_bytes())  # writable, so that tensors may be changed in place
    except OSError as error:
        raise Error(f"{path} cannot be read: {error.strerror}") from None
    header, start = _header(memoryview(data), path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Error(f"{path}: the metadata are no texts")
    tensors = {}
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise Error(f"{path}: tensor {name!r} has no dtype, shape and offsets that this reader knows") from None
        numbers = (*shape, begin, end) if isinstance(shape, list) else (None,)
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
            raise Error(f"{path}: tensor {name!r} has a shape or offsets that are no whole numbers")
        # Beside an empty side the others count as well: torch multiplies them.
        if len(shape) > _MAX_DIMENSIONS or math.prod(max(n, 1) for n in shape) * dtype.itemsize > _MAX_BYTES:
            raise Error(f"{path}: tensor {name!r} has a shape beyond every memory")
        count = math.prod(shape)
        if end - begin != count * dtype.itemsize or start + end > len(data):
            raise Error(f"{path}: tensor {name!r} does not fit its place in the file")
        flat = torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=start + begin) if count else None
        # A copy: aligned, and free of the file's other tensors.
        tensors[name] = torch.empty(shape, dtype=dtype) if flat is None else flat.clone().view(dtype).view(shape)
    return tensors, metadata


def save_file(tensors: dict[str, Tensor], path: str | os.PathLike[str], metadata: dict[str, str] | None = None) -> None:
    """Writes tensors of any device and strides."""
    path = Path(path)
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    offset = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise Error(f"tensor {name!r} is {tensor.dtype}, which safetensors files do not hold")
        if tensor.is_meta:
            raise Error(f"tensor {name!r} is on the device meta, where it has no numbers to write")
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    try:
        handle, temporary = tempfile.mkstemp(prefix=path.name + ".", suffix=".part", dir=path.parent or ".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                for name in order:
                    flat = tensors[name].detach().cpu().contiguous().view(-1)
                    if flat.numel():
                        file.write(flat.view(torch.uint8).numpy().data)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise Error(f"{path} cannot be written: {error.strerror}") from None
