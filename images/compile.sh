#!/bin/sh
# compile.sh FOLDER...: compiles all Python there anew, the same from the same sources each time. The files are never
# compared with their sources, whose times a reproducible build sets; on a read-only root nobody could renew them.
set -eu
for folder; do
  [ -d "$folder" ] || continue
  find "$folder" -name __pycache__ -type d -prune -exec rm -rf {} +
  # Templates and code for other versions of Python are no errors.
  PYTHONHASHSEED=0 python3 -s -m compileall -qq -j 1 --invalidation-mode unchecked-hash "$folder" || true
done
