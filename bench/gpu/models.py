"""Whole models on one GPU, with the mask and without, in one run:

    python3 bench/gpu/models.py [build/libviolin_ops.so] [--cases deit_s_224,deit_s_512,deit_t_1] [--parts train,infer,table]
                                [--variants vanilla,violin,frozen,published] [--pool class|avg] [--quick] [--kernels N]
                                [--smoke] [--json FILE]

Per case, training (bfloat16 autocast, cross entropy, fused AdamW) and inference (bfloat16 weights): images per second and
GiB for
    vanilla     timm's model under torch.compile
    violin      the same plugged, under torch.compile(fullgraph=True)
    frozen      the same with its tables made constants (inference)
    published   the mask as published code computes it, in plain PyTorch: powers for every curve, an N x N tensor per image
and the ratio of each to vanilla. `table` is inference at batch 256 and 224 and 512 pixels, in milliseconds and GiB. Rounds of
the variants alternate, and the median of the rounds is printed, with the clock and the power of the last one where NVML tells
them: at the limit of power, what costs energy costs time. --quick: fewer rounds; --kernels N: also how long all kernels of a
step run, and the N that run longest; --smoke: tiny models on any device, to see that the script runs.
"""

import argparse
import collections
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parent.parent.parent

CASES = {  # image, patch, width, depth, heads, batch
    "deit_s_224": (224, 16, 384, 12, 6, 256),
    "deit_s_512": (512, 16, 384, 12, 6, 64),
    "deit_t_1": (32, 1, 192, 12, 3, 128),
}
TABLE = {"deit_s_224 (batch 256)": (224, 16, 384, 12, 6, 256), "deit_s_512 (batch 256)": (512, 16, 384, 12, 6, 256)}
SMOKE = (16, 8, 48, 2, 3, 2)


class PublishedAttention(nn.Module):
    """The formula as one writes it: gamma ** distance for every curve, averaged, times the logits, softmax, times v."""

    def __init__(self, original, grid, prefix, ranks):
        super().__init__()
        self.qkv, self.proj, self.num_heads = original.qkv, original.proj, original.num_heads
        curves = ranks.shape[0]
        device = original.qkv.weight.device
        self.beta = nn.ParameterList([torch.empty(self.num_heads, device=device).uniform_(5, 9) for _ in range(curves)])
        self.alpha = nn.Parameter(torch.randn(self.num_heads, device=device) * 0.5)
        distance = (ranks[:, :, None] - ranks[:, None, :]).abs()
        self.register_buffer("distance", distance.float().to(device), persistent=False)
        self.prefix = prefix

    def forward(self, x, **_):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        mask = 0
        for distance, beta in zip(self.distance, self.beta):
            mask = mask + torch.sigmoid(beta.float())[:, None, None] ** distance.float()
        mask = F.pad(mask / len(self.beta), (self.prefix, 0, self.prefix, 0), value=1.0)
        logits = (q @ k.transpose(-2, -1)) * (c // self.num_heads) ** -0.5
        logits = logits * (self.alpha.float()[:, None, None] * mask).to(logits.dtype)
        x = (logits.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(b, n, c)
        return self.proj(x)


class Bench:
    def __init__(self, args):
        self.args = args
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.rounds, self.steps = (2, 1) if args.smoke else (3, 10) if args.quick else (7, 20)
        self.results = []
        self.state = {}  # of the device in the last round of each variant

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize()

    def model(self, shape, variant):
        from timm.models.vision_transformer import VisionTransformer

        import violin

        image, patch, width, depth, heads, _ = shape
        pooled = {"class_token": False, "global_pool": "avg"} if self.args.pool == "avg" else {}
        torch.manual_seed(0)
        model = VisionTransformer(
            img_size=image, patch_size=patch, embed_dim=width, depth=depth, num_heads=heads, num_classes=1000, **pooled
        ).to(self.device)
        if variant in ("violin", "frozen"):
            violin.plug(model, init="pretrain")
        elif variant == "published":
            grid = model.patch_embed.grid_size
            ranks = violin.curves.ranks("violin", grid).squeeze(1)
            for block in model.blocks:
                block.attn = PublishedAttention(block.attn, grid, model.num_prefix_tokens, ranks)
        return model

    def compiled(self, model, variant):
        if variant == "published":
            return model
        backend = "aot_eager" if self.args.smoke else "inductor"
        return torch.compile(model, fullgraph=True, dynamic=False, backend=backend)

    def training(self, shape, variant):
        """A function that does one step."""
        model = self.model(shape, variant).train()
        function = self.compiled(model, variant)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=self.cuda)
        images, labels = self.batch(shape)

        def step():
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda):
                loss = F.cross_entropy(function(images).float(), labels)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()

        return step

    def inference(self, shape, variant):
        import violin

        model = self.model(shape, variant).eval()
        if self.cuda:
            model.bfloat16()
            for _, mask in violin.masks(model):
                mask.float()
        if variant == "frozen":
            violin.freeze(model, dtype=torch.bfloat16 if self.cuda else None)
        function = self.compiled(model, variant)
        images = self.batch(shape)[0].to(torch.bfloat16 if self.cuda else torch.float32)

        @torch.no_grad()
        def step():
            return function(images)

        return step

    def batch(self, shape):
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(shape[-1], 3, shape[0], shape[0], generator=generator)
        labels = torch.randint(1000, (shape[-1],), generator=generator)
        return images.to(self.device), labels.to(self.device)

    def measure(self, name, shape, what, variants):
        make = self.training if what == "train" else self.inference
        steps, memory, failed = {}, {}, {}
        for variant in [v for v in variants if v in self.args.variants.split(",")]:
            self.free()
            base = torch.cuda.memory_allocated() if self.cuda else 0
            try:
                started = time.perf_counter()
                step = make(shape, variant)
                for _ in range(1 if self.args.smoke else 3):
                    step()
                self.synchronize()
                if self.cuda:
                    torch.cuda.reset_peak_memory_stats()
                step()
                self.synchronize()
                memory[variant] = (torch.cuda.max_memory_allocated() - base) / 2**30 if self.cuda else 0.0
                steps[variant] = step
                print(f"# {name} {what} {variant}: ready in {time.perf_counter() - started:.0f} s", file=sys.stderr)
            except torch.cuda.OutOfMemoryError:
                failed[variant] = "out of memory"
        times = {variant: [] for variant in steps}
        self.state = {}
        for _ in range(self.rounds):
            for variant, step in steps.items():
                times[variant].append(self.time(step))
                self.state[variant] = self.state.pop("now", "")
        self.report(name, shape, what, {v: statistics.median(t) for v, t in times.items()}, memory, failed)
        if self.args.kernels and self.cuda:
            for variant, step in steps.items():
                self.kernels(f"{name} {what} {variant}", step)

    def kernels(self, title, step, repeats=4):
        """Milliseconds of a step's kernels, all and the longest."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            for _ in range(repeats):
                step()
            torch.cuda.synchronize()
        total, count = collections.Counter(), collections.Counter()
        for event in prof.events():
            if str(event.device_type).endswith("CUDA") and event.device_time_total > 0:
                total[event.name] += event.device_time_total / 1000 / repeats
                count[event.name] += 1 / repeats
        print(f"# {title}: kernels {sum(total.values()):.2f} ms")
        for kernel, milliseconds in total.most_common(self.args.kernels):
            print(f"#   {milliseconds:8.3f} ms x{count[kernel]:6.1f} {kernel[:120]}", flush=True)

    def time(self, step):
        """Seconds per call."""
        step()
        self.synchronize()
        if self.cuda:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(self.steps):
                step()
            stop.record()
            try:
                self.state["now"] = f"{torch.cuda.clock_rate()} MHz {torch.cuda.power_draw() / 1000:.0f} W"
            except Exception:  # no NVML
                self.state["now"] = ""
            torch.cuda.synchronize()
            return start.elapsed_time(stop) / 1000 / self.steps
        begin = time.perf_counter()
        for _ in range(self.steps):
            step()
        return (time.perf_counter() - begin) / self.steps

    def free(self):
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def report(self, name, shape, what, seconds, memory, failed):
        batch = shape[-1]
        for variant in [*seconds, *failed]:
            row = {"case": name, "what": what, "batch": batch, "variant": variant}
            if variant in failed:
                print(f"{name:24} {what:6} {variant:10} {failed[variant]}")
                self.results.append({**row, "failed": failed[variant]})
                continue
            s = seconds[variant]
            row.update(images_per_second=batch / s, milliseconds=1000 * s, gib=memory[variant])
            line = f"{name:24} {what:6} {variant:10} {batch / s:10.1f} images/s {1000 * s:9.2f} ms {memory[variant]:7.2f} GiB"
            if "vanilla" in seconds and variant != "vanilla":
                row["speed_ratio"] = seconds["vanilla"] / s
                line += f"   speed {row['speed_ratio']:.3f}"
                if memory["vanilla"]:
                    row["memory_ratio"] = memory[variant] / memory["vanilla"]
                    line += f"   memory {row['memory_ratio']:.3f}"
            print(f"{line}   {self.state.get(variant, '')}".rstrip(), flush=True)
            self.results.append(row)

    @torch.no_grad()
    def agreement(self, shape):
        """What plugging with `identity` changes in the logits, relative to the largest."""
        import violin

        torch.backends.cudnn.allow_tf32 = False  # the patch embedding; products are exact unless asked
        model = self.model(shape, "vanilla").eval()
        images = self.batch(shape)[0][:8]
        before = model(images)
        after = violin.plug(model)(images)
        return float((after - before).abs().max() / before.abs().max())

    def run(self):
        args = self.args
        device = torch.cuda.get_device_name() if self.cuda else "CPU"
        print(f"{device}, torch {torch.__version__}, pool {args.pool}")
        cases = {"smoke": SMOKE} if args.smoke else {name: CASES[name] for name in args.cases.split(",")}
        first = next(iter(cases.values()))
        print(f"identity changes logits by {self.agreement(first):.1e} of the largest (float32)")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        for name, shape in cases.items():
            if "train" in args.parts:
                self.measure(name, shape, "train", ("vanilla", "violin", "published"))
            if "infer" in args.parts:
                self.measure(name, shape, "infer", ("vanilla", "violin", "frozen", "published"))
            torch._dynamo.reset()
            self.free()
        if "table" in args.parts:
            for name, shape in ({"smoke table": SMOKE} if args.smoke else TABLE).items():
                self.measure(name, shape, "infer", ("vanilla", "violin", "frozen", "published"))
                torch._dynamo.reset()
                self.free()
        if args.json:
            Path(args.json).write_text(
                json.dumps({"device": device, "torch": torch.__version__, "rows": self.results}, indent=1)
            )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", default=str(ROOT / "build" / "libviolin_ops.so"))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--parts", default="train,infer,table")
    parser.add_argument("--variants", default="vanilla,violin,frozen,published")
    parser.add_argument("--pool", default="class", choices=("class", "avg"), help="class token, or average without one")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="also the N kernels that run longest")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() and not args.smoke:
        print("no CUDA device: nothing to measure (--smoke runs tiny models on the CPU)")
        return
    os.environ["VIOLIN_OPS_LIBRARY"] = os.path.abspath(args.library)
    sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools")]
    import without_torchvision

    without_torchvision.install()
    for limit in ("recompile_limit", "cache_size_limit"):  # several models share a forward function
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, 64)
    Bench(args).run()


if __name__ == "__main__":
    main()
