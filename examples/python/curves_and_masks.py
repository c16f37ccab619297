"""Pictures of the curves, and of the masks that they make:

    python3 examples/python/curves_and_masks.py [--out FOLDER]

Writes into FOLDER, or here.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "python"))  # unless installed
import violin

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path())
out = parser.parse_args().out
out.mkdir(parents=True, exist_ok=True)

violin.plot.curves("violin", (14, 10)).savefig(out / "curves.png", dpi=80)

# Decay lengths from four patches (head 0) to the whole grid (head 5).
mask = violin.ViolinMask(heads=6, init="spread", grid=(14, 14))
violin.plot.mask(mask, (14, 14), at=(4, 9), columns=6).savefig(out / "mask.png", dpi=80)
print(f"curves.png and mask.png are in {out.resolve()}")
