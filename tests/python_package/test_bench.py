"""The speed script and the examples run; what they print is for GPUs and for people."""

import json
import os
import runpy
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from models import build

import violin

ROOT = Path(__file__).parent.parent.parent


def script(path, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "VIOLIN_OPS_LIBRARY": violin.LIBRARY}
    command = [sys.executable, ROOT / path, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)


def test_speed_of_models_runs_on_any_device(timm, tmp_path):
    done = script("bench/gpu/models.py", violin.LIBRARY, "--smoke", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    seen = {(row["case"], row["what"], row["variant"]) for row in rows}
    variants = ("vanilla", "violin", "frozen", "published")
    assert seen == {("smoke", "train", v) for v in variants if v != "frozen"} | {
        (case, "infer", v) for case in ("smoke", "smoke table") for v in variants
    }
    assert all(row["images_per_second"] > 0 for row in rows)
    assert all(row["speed_ratio"] > 0 for row in rows if row["variant"] != "vanilla")


def test_speed_of_attention_runs_on_any_device(tmp_path):
    out = tmp_path / "out.json"
    done = script("bench/gpu/attention.py", violin.LIBRARY, "--smoke", "--repeats", 2, "--layout", "both",
                  "--peers", "cudnn,plain", "--json", out)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    ours = {"table": {"violin"}, "learned": {"violin, mask as a table"}}
    if torch.cuda.is_available():
        ours = {"table": {"violin", "violin, mask packed"}, "learned": {"violin", "violin, mask as a table"}}
    for layout in ("heads", "packed"):
        for mask in ("table", "learned"):
            some = {r["what"]: r for r in rows if (r["layout"], r["mask"]) == (layout, mask)}
            assert some.keys() >= ours[mask] | {"violin, no mask", "formula, plain"}
            for label in ours[mask] | {"violin, no mask", "formula, plain"}:
                assert max(some[label]["error"]) < 1e-2, label
    if not torch.cuda.is_available():
        assert "cuDNN, no mask" in done.stdout and "failed" in done.stdout  # said, and not fatal
    swept = script("bench/gpu/attention.py", violin.LIBRARY, "--smoke", "--sweep", "--repeats", 2, "--mask", "table",
                   "--peers", "plain", "--dtype", "float32")  # fmt: skip
    assert [line.split()[0] for line in swept.stdout.splitlines() if "heads, mask table" in line] == ["16x8", "17x8"]
    wrong = script("bench/gpu/attention.py", violin.LIBRARY, "--shapes", "ax")
    assert wrong.returncode == 2 and "no shape x" in wrong.stderr


def test_published_formula_is_the_mask_that_is_timed_against(timm):
    namespace = runpy.run_path(str(ROOT / "bench" / "gpu" / "models.py"))
    model = violin.plug(build("vit"), init="pretrain")
    layer = model.blocks[0].attn
    ranks = violin.curves.ranks("violin", (4, 4)).squeeze(1)
    published = namespace["PublishedAttention"](layer, (4, 4), 1, ranks)
    with torch.no_grad():
        layer.violin.alpha.copy_(published.alpha)
        layer.violin.beta.copy_(torch.stack(list(published.beta)))
    x = torch.randn(2, 17, 24)
    torch.testing.assert_close(published(x), layer(x), rtol=1e-4, atol=1e-5)


def write_png(path, pixels):
    """pixels [H,W,3] uint8"""
    height, width, _ = pixels.shape
    raw = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    )


@pytest.fixture
def pictures(tmp_path):
    """Two classes that differ in colour."""
    for split, count in (("train", 24), ("test", 8)):
        for label, name in enumerate(("reddish", "bluish")):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = torch.randint(0, 128, (32, 32, 3), dtype=torch.uint8)
                pixels[..., 2 * label] += 100
                write_png(folder / f"{index}.png", pixels)
    return tmp_path / "data"


def test_finetuning_example_learns_and_writes_a_weights_file(pictures, tmp_path, timm):
    pytest.importorskip("PIL", reason="pillow is not installed")
    out = tmp_path / "model.safetensors"
    done = script(
        "examples/python/finetune_cifar.py", pictures, "--out", out, "--pretrain-epochs", 2, "--epochs", 2, "--dim", 48,
        "--depth", 2, "--batch", 16,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "mask" in done.stdout
    model = violin.load(out)
    assert model.violin_file["classes"] == ["bluish", "reddish"] and violin.is_plugged(model)


def test_gallery_of_examples(tmp_path, timm):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for name in sorted(path.name for path in (ROOT / "examples" / "python").glob("*.py")):
        if name == "finetune_cifar.py":
            continue
        done = script(f"examples/python/{name}", "--out", tmp_path)
        assert done.returncode == 0, f"{name}: {done.stderr}"
    assert len(list(tmp_path.glob("*.png"))) >= 3
