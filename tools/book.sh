#!/bin/sh
# Builds the book from nothing: executes every notebook, fails on any warning, then checks what came out.
set -eu
cd "$(dirname "$0")/.."
start=$(date +%s)
log=_build/book.log
rm -rf _build/html _build/jupyter_execute _build/.doctrees
mkdir -p _build
echo "Book: executing $(ls notebooks/*.ipynb | wc -l | tr -d ' ') notebook(s) and building the pages (log: $log)"
if ! .venv/bin/python .venv/bin/jupyter-book build . -W -n --keep-going >"$log" 2>&1; then
  grep -nE 'WARNING|ERROR|Error:|Exception' "$log" | tail -n 30 >&2 || true
  echo "Book: the build failed; the whole log is in $log" >&2
  exit 1
fi
.venv/bin/python tools/check_book.py
echo "Book: done in $(($(date +%s) - start)) s. Open: $PWD/_build/html/index.html"
