#!/usr/bin/env bash
# make demo: the main job on real images, and an honest look at it. On 1,200 images of CIFAR-100 a small vision transformer
# is trained three times over: without a mask, with the mask from space-filling curves, and with a mask from random
# orders, which has the same parameters but knows nothing about where patches lie. Within a seed all three have the same
# initial weights and the same images in the same order. Then: accuracy on 300 other images, predictions, a report.
# Everything lands in out/demo. About three minutes on two cores; EPOCHS and SEEDS change that.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out/demo
data=examples/cifar100-sample
epochs=${EPOCHS:-8}
read -r -a seeds <<<"${SEEDS:-0 1}"
threads=${THREADS:-2}
begin=$SECONDS
rm -rf "$out"
mkdir -p "$out/logs"
log="$out/logs/after.log" # progress of everything after training; its last line says why something failed

train() { # name, seed, options of the mask
  local run="$out/$1-$2" text="$out/logs/$1-$2"
  local options=("${@:3}")
  printf '   %-8s seed %s: ' "$1" "$2"
  if ! build/violin train --data "$data" --model violin_vit_micro_patch4_32 --out "$run" --seed "$2" --epochs "$epochs" \
    --batch-size 60 --lr 1e-3 --warmup-epochs 1 --mixup 0 --cutmix 0 --erase 0 --drop-path 0 --threads "$threads" \
    "${options[@]}" >"$text.txt" 2>"$text.log"; then
    printf 'failed\n'
    tail -n 1 "$text.log" >&2
    exit 1
  fi
  sed -n 's/^trained .* in \([^ ]*\) .*/\1, /p; s/^test //p' "$text.txt" | tr -d '\n'
  printf '\n'
}

echo "1. Train: 1,200 images of ten classes, a ViT of 0.7 million parameters, $epochs epochs, ${#seeds[@]} seed(s)"
orders=random:0,random:1,random:2,random:3,random:4,random:5,random:6,random:7
runs=()
for seed in "${seeds[@]}"; do
  train vanilla "$seed" --no-violin
  train random "$seed" --init spread --curves "$orders"
  train violin "$seed" --init spread
done
for name in vanilla random violin; do
  for seed in "${seeds[@]}"; do runs+=("$out/$name-$seed"); done
done
first="$out/violin-${seeds[0]}"
trap 'tail -n 1 "$log" >&2' ERR

echo
echo "2. Evaluate the masked one class by class, on 300 images that training never saw (one in ten is right by chance)"
build/violin eval "$first" --data "$data" --per-class --threads "$threads" 2>>"$log"

echo
echo "3. Predict, and show where the model looked"
images=()
for class in apple castle dolphin motorcycle sunflower tiger; do
  images+=("$(find "$data/test/$class" -name '*.png' | sort | sed -n 7p)")
done
build/violin predict "$first" "${images[@]}" --top 2 --attention "$out/attention.png" --threads "$threads" 2>>"$log"
build/violin curves --grid 8x8 --image examples/images/castle.png --png "$out/curves.png" >/dev/null 2>>"$log"

echo
echo "4. Compare. vanilla: no mask. random: the mask over random orders. violin: the mask over space-filling curves."
echo "   ± is the deviation over seeds; 300 test images alone leave an accuracy uncertain by about 3 points."
build/violin report "${runs[@]}" --out "$out/report.html" --threads "$threads" 2>>"$log"
echo "One run alone: build/violin report $first"

echo
echo "Done in $((SECONDS - begin)) s. Open $out/report.html in a browser; pictures: $out/attention.png, $out/curves.png."
echo "A few epochs on 1,200 images are a tour, not evidence."
echo "Your own images: build/violin train --data FOLDER --help, or build/violin finetune --weights FILE --data FOLDER"
