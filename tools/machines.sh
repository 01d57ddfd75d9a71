#!/bin/sh
# Plays other machines: everything that the tests and the stored outputs say must hold there as well.
#
#   make portable                             the tests and all notebooks on each of them
#   make portable ON=old1 WHAT=notebooks/     only on this machine, and only this, as in .ci/run
set -u
cd "$(dirname "$0")/.." || exit 1
CORES=${CORES:-2}

on() { # on <machine> <command …>: run the command as on that machine
  machine=$1
  shift
  case $machine in
    old*) # a processor without AVX: other code in torch, oneDNN, MKL, OpenBLAS and numpy, so other last digits
      set -- ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OPENBLAS_CORETYPE=Prescott MKL_CBWR=COMPATIBLE \
        NPY_DISABLE_CPU_FEATURES="X86_V3 X86_V4 AVX512_ICL AVX512_SPR" "$@" ;;
  esac
  case $machine in # another number of threads adds in another order; another seed orders sets differently
    here1 | old1) env OMP_NUM_THREADS=1 PYTHONHASHSEED=1 "$@" ;;
    here2 | old2) env OMP_NUM_THREADS=2 PYTHONHASHSEED=2 "$@" ;;
    *) echo "machine = $machine: must be here1, here2, old1 or old2" >&2; return 2 ;;
  esac
}

machines= # tools/machines.sh [machine …] [-- folder or notebook …]
while [ $# -gt 0 ]; do
  [ "$1" = -- ] && { shift; break; }
  machines="$machines $1"
  shift
done
[ $# -gt 0 ] || set -- tests/ notebooks/

failed=
for machine in ${machines:-here1 here2 old1 old2}; do
  for what in "$@"; do
    printf '\n== %s on %s\n' "$what" "$machine"
    case $what in
      notebooks/*) on "$machine" .venv/bin/python -m pytest -q -n "$CORES" --dist loadfile --nbval -p no:cacheprovider "$what" ;;
      *) on "$machine" .venv/bin/python -m pytest -q -n "$CORES" "$what" ;;
    esac || failed="$failed; $what on $machine"
  done
done
[ -z "$failed" ] || { printf '\nFAILED: %s\n' "${failed#; }" >&2; exit 1; }
printf '\nThe same on every machine.\n'
