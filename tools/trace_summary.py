#!/usr/bin/env python3
"""Where a training step's time goes on the GPU: sums a trace of `violin bench model --trace FOLDER` by kernel.

    tools/trace_summary.py FOLDER/violin.json [FOLDER/vanilla.json]

With two files the second is the peer, and kernels are sorted by how much more time the first spends in them.
"""

import collections
import json
import sys


def kernels(path):
    sums, counts, begin, end = collections.Counter(), collections.Counter(), float("inf"), 0
    with open(path, encoding="utf-8") as file:
        for event in json.load(file)["traceEvents"]:
            if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
                continue
            sums[event["name"]] += event["dur"]
            counts[event["name"]] += 1
            begin, end = min(begin, event["ts"]), max(end, event["ts"] + event["dur"])
    return sums, counts, max(0, end - begin)


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sums, counts, span = kernels(sys.argv[1])
    peer, peer_counts, peer_span = kernels(sys.argv[2]) if len(sys.argv) == 3 else ({}, {}, 0)
    if not sums:
        sys.exit(f"{sys.argv[1]} holds no work of a GPU")
    print(f"{'us':>10} {'calls':>6} {'peer us':>10} {'calls':>6}  kernel")
    print(f"{sum(sums.values()):10.0f} {sum(counts.values()):6} {sum(peer.values()):10.0f} "
          f"{sum(peer_counts.values()):6}  all; from first to last {span:.0f}, peer {peer_span:.0f}")
    names = sorted({*sums, *peer}, key=lambda name: peer.get(name, 0) - sums.get(name, 0))
    for name in names:
        print(f"{sums.get(name, 0):10.0f} {counts.get(name, 0):6} {peer.get(name, 0):10.0f} {peer_counts.get(name, 0):6}"
              f"  {name[:150]}")


if __name__ == "__main__":
    main()
