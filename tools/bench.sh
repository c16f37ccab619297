#!/usr/bin/env bash
# make bench: attention and a whole model on this machine's CPU (a GPU: make gpu-bench).
set -euo pipefail
cd "$(dirname "$0")/.."
build/violin bench attention
python="$(cat .violin/python)"
peer=()
if "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("timm") is None)'; then peer=(--peer "$python bench/model_peer.py"); fi
build/violin bench model "${peer[@]}"
