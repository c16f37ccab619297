#!/usr/bin/env bash
# clang-format over every tracked or new C++ and CUDA file; --check only says what would change.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v clang-format-19 >/dev/null; then
  echo "format: clang-format-19 is not installed; skipped" >&2
  exit 0
fi
mapfile -t files < <(git ls-files --cached --others --exclude-standard -- '*.cpp' '*.h' '*.cu' '*.cuh' | sort -u |
  while read -r file; do [ -e "$file" ] && echo "$file"; done)
[ ${#files[@]} = 0 ] && exit 0
if [ "${1:-}" = --check ]; then
  clang-format-19 --dry-run --Werror "${files[@]}" || { echo "format: run 'make format' and commit the result" >&2; exit 1; }
else
  clang-format-19 -i "${files[@]}"
fi
