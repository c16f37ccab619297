#!/usr/bin/env python3
"""Accuracy over epochs out of the log.csv of several runs, as one picture.

    tools/plot_runs.py OUT.png LABEL=log.csv …
"""

import csv
import sys


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), dpi=110)
    for argument in sys.argv[2:]:
        label, path = argument.split("=", 1)
        with open(path, encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["val_top1"]]
        if not rows:
            sys.exit(f"plot_runs: {path} has no accuracy on val")
        epochs = [int(row["epoch"]) + 1 for row in rows]
        accuracy = [float(row["val_top1"]) for row in rows]
        axes.plot(epochs, accuracy, linewidth=1.6, label=f"{label} ({accuracy[-1]:.1f})")
    axes.set_xlabel("epoch")
    axes.set_ylabel("top-1 in %")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(sys.argv[1])


if __name__ == "__main__":
    main()
