#!/usr/bin/env bash
# make demo: the main job on real images. A small vision transformer with a mask is trained on 1,200 images of CIFAR-100,
# measured on 300 others, and asked about a few of them. Everything lands in out/demo.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out/demo
data=examples/cifar100-sample
epochs=${EPOCHS:-20}
rm -rf "$out"
mkdir -p "$out"

echo "1. Train: 1,200 images of ten classes, a ViT of 0.7 million parameters with a mask from eight curves, $epochs epochs"
build/violin train --data "$data" --model violin_vit_micro_patch4_32 --init spread --out "$out/run" --epochs "$epochs" \
  --batch-size 60 --lr 1e-3 --mixup 0 --cutmix 0 --erase 0 --warmup-epochs 2 --drop-path 0

echo
echo "2. Evaluate on 300 images that training never saw (one in ten would be right by chance)"
build/violin eval "$out/run" --data "$data" --per-class

echo
echo "3. Predict, and show where the model looked"
images=()
for class in apple castle dolphin motorcycle sunflower tiger; do
  images+=("$(find "$data/test/$class" -name '*.png' | sort | sed -n 7p)")
done
build/violin predict "$out/run" "${images[@]}" --top 2 --attention "$out/attention.png"

echo
echo "4. What the mask learned: the decay of every layer, head and curve"
build/violin inspect "$out/run" --png "$out/decay.png" >"$out/inspect.txt"
build/violin curves --grid 8x8 --image examples/images/castle.png --png "$out/curves.png" >/dev/null

echo
echo "Pictures: $out/attention.png, $out/decay.png, $out/curves.png. Run: $out/run (config.json, log.csv, weights)."
echo "Your own images: build/violin train --data FOLDER --help, or build/violin finetune --weights FILE --data FOLDER"
