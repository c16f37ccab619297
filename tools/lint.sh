#!/usr/bin/env bash
# clang-tidy over the C++ files that differ from the last commit or from the upstream branch; `all` for every file.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v clang-tidy-19 >/dev/null || { echo "lint: clang-tidy-19 is not installed; run tools/setup.sh lint" >&2; exit 1; }
base=$(git merge-base HEAD '@{upstream}' 2>/dev/null || echo HEAD)
if [ "${1:-}" = all ]; then list() { git ls-files -- '*.cpp'; }
else list() { git diff --name-only --diff-filter=d "$base" -- '*.cpp'; git ls-files --others --exclude-standard -- '*.cpp'; }; fi
# Only files that the build compiles: examples and consumer projects have builds of their own.
mapfile -t files < <(list | sort -u | while read -r file; do grep -q "\"[^\"]*/$file\"" build-lint/compile_commands.json && echo "$file"; done)
if [ ${#files[@]} = 0 ]; then echo "lint: no changed files (make lint LINT=all checks every file)"; exit 0; fi
# The build's warnings are g++'s, and so is its OpenMP.
arguments=(--extra-arg=-Wno-unknown-warning-option --extra-arg=-fno-openmp)
printf '%s\n' "${files[@]}" | xargs -P "$(nproc)" -n 1 clang-tidy-19 -p build-lint --quiet "${arguments[@]}"
echo "lint: ${#files[@]} files are clean"
