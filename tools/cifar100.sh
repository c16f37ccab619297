#!/usr/bin/env bash
# The runs of docs/results.md: small vision transformers on CIFAR-100, with the mask and without.
#
#   tools/cifar100.sh DATA OUT NAME…
#
# DATA holds train/<class>/… and val/<class>/… (all 50,000 and 10,000 images); OUT gets a run and its predictions per NAME:
#   class    vanilla with a class token          gap      vanilla with average pooling
#   violin   the mask over eight curves          random   the mask over eight random orders
#   alpha    one learned factor per head, no curves
# each also with -spread: masks that start with decay lengths from four patches to the whole image (default: as published).
# A run that is there is taken up where it stopped. Environment:
#   EPOCHS (40)  SEED (0)  LIMIT (0: all images)  PATCH (2 pixels)  DEPTH (9 layers)  BATCH (256)  PRECISION (bf16)
#   OPTIONS: further ones of violin train  VIOLIN (build/violin)
#   STEPS: so many instead of EPOCHS, whatever LIMIT is, the first twentieth to warm up, evaluated at the end only
set -euo pipefail
cd "$(dirname "$0")/.."
data=${1:?usage: tools/cifar100.sh DATA OUT NAME…} out=${2:?usage: tools/cifar100.sh DATA OUT NAME…}
shift 2
epochs=${EPOCHS:-40} seed=${SEED:-0} limit=${LIMIT:-0} patch=${PATCH:-2} depth=${DEPTH:-9} batch=${BATCH:-256} precision=${PRECISION:-bf16} schedule=()
violin=${VIOLIN:-build/violin}
if [ -n "${STEPS:-}" ]; then
  images=$limit
  [ "$images" != 0 ] || images=50000
  epochs=$((STEPS / (images / batch)))  # an epoch leaves out what does not fill a batch
  [ $((epochs * (images / batch))) = "$STEPS" ] || { echo "STEPS=$STEPS of $batch images are no whole passes over $images" >&2; exit 2; }
  schedule=(--warmup-epochs "$(awk "BEGIN { print $epochs / 20 }")" --eval-every "$epochs")
fi
orders=random:0,random:1,random:2,random:3,random:4,random:5,random:6,random:7
mkdir -p "$out"
for name in "$@"; do
  config=docs/results/gap.json mask=()
  case ${name%-spread} in
    class) config=docs/results/class.json mask=(--no-violin) ;;
    gap) mask=(--no-violin) ;;
    violin) mask=(--violin) ;;
    random) mask=(--violin --curves "$orders") ;;
    alpha) mask=(--violin --curves none) ;;
    *) echo "unknown run '$name'" >&2; exit 2 ;;
  esac
  [[ $name == *-spread ]] && mask+=(--init spread)
  label=$name-s$seed
  [ "$limit" != 0 ] && label=$label-n$limit
  [ "$patch" != 2 ] && label=$label-p$patch
  [ "$depth" != 9 ] && label=$label-d$depth
  run=$out/$label
  if [ -e "$run/config.json" ]; then
    start=(--resume "$run")
  else
    sed "s/\"patch_size\": 2/\"patch_size\": $patch/; s/\"depth\": 9/\"depth\": $depth/" "$config" >"$out/$label.json"
    # shellcheck disable=SC2206
    start=(--data "$data" --out "$run" --config "$out/$label.json" "${mask[@]}" --epochs "$epochs" "${schedule[@]}"
      --batch-size "$batch" --lr 1e-3 --precision "$precision" --seed "$seed" --limit "$limit" ${OPTIONS:-})
  fi
  "$violin" train "${start[@]}" 2>"$out/$label.log"
  "$violin" eval "$run/last" --data "$data" --split val --batch 500 --precision "$precision" --predictions "$out/$label.csv"
done
