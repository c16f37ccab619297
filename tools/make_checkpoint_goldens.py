"""Writes the small torch files in tests/golden/checkpoint, and what they hold as safetensors.

    python tools/make_checkpoint_goldens.py tests/golden/checkpoint

The same tree is saved in every pickle protocol and in the format before torch 1.6. `tensors.safetensors` holds its
tensors, row-major, under the path to each; it is written here byte by byte, so that reader and writer are both checked
against something that is neither.
"""

import argparse
import collections
import json
import pathlib
import struct
import sys

import numpy as np
import torch

NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16", torch.uint32: "U32",
    torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64",
}


def of_every_dtype():
    tensors = collections.OrderedDict()
    for dtype, name in NAMES.items():
        size = torch.empty(0, dtype=dtype).element_size()
        raw = torch.arange(6 * size, dtype=torch.uint8) * 7 % 101
        if dtype == torch.bool:
            raw %= 2
        tensors[name] = raw.view(dtype).reshape(2, 3)
    return tensors


def views():
    base = torch.arange(24, dtype=torch.float32)
    grid = base.view(4, 6)
    tagged = torch.full((2,), 5.0)
    tagged.note = "carries an attribute"
    parameter = torch.nn.Parameter(torch.tensor([1.5, -2.5]))
    parameter.scale = 3
    return {
        "base": base,
        "transposed": grid.t(),
        "inner": grid[1:3, 2:5],
        "every_other": grid[:, ::2],
        "expanded": torch.tensor([3.0]).expand(2, 4),
        "channels_last": torch.arange(48, dtype=torch.float32).view(2, 3, 2, 4).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(7.25),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.tensor([0.5, 1.0]), requires_grad=False),
        "parameter_with_state": parameter,
        "tagged": tagged,
    }


def extras():
    counts = collections.defaultdict(list)
    counts["a"].append(1)
    module = torch.nn.Linear(1, 1)
    with torch.no_grad():
        module.weight.fill_(2.0)
        module.bias.fill_(-1.0)
    return {
        "epoch": 300,
        "negative": -70000,
        "wide": 2**40 + 1,
        "huge": 2**70,
        "loss": 0.125,
        "best": np.float64(81.5),
        "steps": np.int64(-12),
        "flag": np.bool_(True),
        "done": False,
        "nothing": None,
        "name": "Größe ✓",
        "raw": b"\x00\xffbytes",
        "array": bytearray(b"abc"),
        "numbers": {1, 2},
        "shape": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "path": pathlib.PurePosixPath("out/run"),
        "counts": counts,
        "schedule": [0.5, (1, 2), {"nested": {"deep": torch.tensor([9], dtype=torch.int64)}}],
        "args": argparse.Namespace(arch="vit_small", patch_size=16, lr=5e-4, crops=(0.4, 1.0), use_fp16=True),
        "module": module.state_dict(),
        "optimizer": {"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "statistics": np.arange(3, dtype=np.int16),
    }


def flatten(value, path=()):
    if isinstance(value, torch.Tensor):
        yield ".".join(path), value.detach()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(item, path + (str(key),))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from flatten(item, path + (str(i),))


def write_safetensors(path, tensors):
    header, chunks, offset = {}, [], 0
    for name, tensor in sorted(tensors, key=lambda item: (-item[1].element_size(), item[0])):
        data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
        chunks.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    tree = {"dtypes": of_every_dtype(), "views": views(), "extras": extras()}
    for protocol in (2, 3, 4, 5):
        torch.save(tree, folder / f"protocol_{protocol}.pth", pickle_protocol=protocol)
    torch.save(tree, folder / "legacy.pth", _use_new_zipfile_serialization=False)
    write_safetensors(folder / "tensors.safetensors", flatten(tree))
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(folder / "script.pt"))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
