#!/usr/bin/env bash
# make bench: attention on this machine's CPU, and on its GPU where there is one.
set -euo pipefail
cd "$(dirname "$0")/.."
build/violin bench attention
