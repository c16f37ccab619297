"""timm's twin of a model for `violin bench model --peer "python3 bench/model_peer.py [--compile]"`.

Reads one line of JSON (the model, batch, threads, device, bf16), answers 0, then answers "infer" and "train" with seconds.
--compile: under torch.compile.
"""

import json
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools"))
import without_torchvision  # noqa: E402

without_torchvision.install()

import torch  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

KEYS = "img_size patch_size in_chans num_classes embed_dim depth num_heads mlp_ratio qkv_bias class_token reg_tokens pos_embed " \
       "no_embed_class global_pool fc_norm init_values drop_path_rate".split()


def main():
    answers = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr
    request = json.loads(sys.stdin.readline())
    device = torch.device(request["device"])
    torch.set_num_threads(request["threads"])
    model = request["model"]
    model["global_pool"] = model["global_pool"] or ""
    net = VisionTransformer(**{key: model[key] for key in KEYS}).to(device)
    sides = model["img_size"] if isinstance(model["img_size"], list) else [model["img_size"]] * 2
    images = torch.randn(request["batch"], model["in_chans"], *sides, device=device)
    labels = torch.arange(request["batch"], device=device) % model["num_classes"]
    if "--compile" in sys.argv[1:]:
        net = torch.compile(net, dynamic=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=request["bf16"])

    def infer():
        net.eval()
        with torch.no_grad(), autocast:
            net(images)

    def train():
        net.train()
        optimizer.zero_grad()
        with autocast:
            loss = torch.nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()

    def answer(seconds):
        print(seconds, file=answers, flush=True)

    answer(0)
    for line in sys.stdin:
        work = {"infer": infer, "train": train}[line.strip()]
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        answer(time.perf_counter() - start)


main()
