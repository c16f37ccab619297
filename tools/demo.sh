#!/usr/bin/env bash
# make demo: what the curves do to an image, as pictures in out/demo and as text here.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out/demo
photo=examples/images/castle.png
mkdir -p "$out"

echo "Four curves over an 8x8 grid; ● is the first patch, ○ the last"
echo
build/violin curves --grid 8x8 --set normal
echo
build/violin curves --grid 16x16 --image "$photo" --png "$out/curves.png" --svg "$out/curves.svg" >/dev/null
build/violin curves --grid 8x8 --flatten --image "$photo" --png "$out/sequences.png" >/dev/null
build/violin mask --grid 14x14 --gamma 0.98 --at 0,0 --at 7,7 --at 13,13 --png "$out/mask.png" >/dev/null
echo
echo "What a patch in the middle attends to when only distance counts (four curves and their mean, gamma 0.98)"
echo
build/violin mask --grid 14x14 --set normal --gamma 0.98 --at 7,7
echo
echo "Pictures: $out/curves.png (the curves over a photo), $out/sequences.png (the photo as each curve reads it),"
echo "          $out/mask.png (the decay mask around three patches)"
