#!/bin/sh
# Makes .venv inside the project and installs the tested versions into it, once. Called by every target of the
# Makefile; takes a few milliseconds when there is nothing to do. An environment that you have activated is ignored.
set -eu
cd "$(dirname "$0")/.."

NEED_GB=10                    # free space for the first installation: packages, and the downloads while it runs
VENV=.venv
STAMP=$VENV/.lipmdeq-ready    # holds a fingerprint of what was installed
BUSY=$VENV/.lipmdeq-busy      # holds the process id of a running installation; left over, it tells of a broken one
LOG=$VENV/install.log

unset PYTHONPATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV \
  PIP_CONSTRAINT 2>/dev/null || true

say() { printf '%s\n' "$*"; }
die() { printf 'lipmdeq: %s\n' "$*" >&2; exit 1; }

fingerprint() { # the files that decide what is installed, and where (an environment cannot be moved)
  { cat pyproject.toml constraints.txt; pwd -P; } | cksum
}

at_home() { # whether the environment was made in this folder: venv notes the path, and programs in it begin with it
  case $(grep '^command = ' "$VENV/pyvenv.cfg" 2>/dev/null) in
    *" $(pwd -P)/$VENV") ;;
    *) return 1 ;;
  esac
}

find_python() { # prints the first interpreter that really runs and is 3.11, 3.12 or 3.13
  seen=
  for name in "${PYTHON:-}" python3.11 python3 python3.12 python3.13; do
    [ -n "$name" ] && version=$("$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    case $version in
      3.11 | 3.12 | 3.13) printf '%s\n' "$name"; return ;;
      *) seen="$seen $name is $version." ;;
    esac
  done
  die "Python 3.11, 3.12 or 3.13 is needed;${seen:- no python3 was found.} Older ones lack language features, newer ones lack tested packages. Install Python 3.11, or name one: make PYTHON=/path/to/python3.11"
}

make_venv() {
  python=$(find_python)
  free_gb=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
  [ "$free_gb" -ge "$NEED_GB" ] || die "$free_gb GB free on this disk; $NEED_GB GB are needed for the first installation."
  say "Set-up: $("$python" --version 2>&1), virtual environment in $VENV"
  "$python" -m venv --clear "$VENV" 2>&1 ||
    die "python -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"
}

progress() { # one line every 20 seconds, so that nobody wonders whether it hangs
  while sleep 20 >/dev/null 2>&1; do say "  … $(($(date +%s) - start)) s, $(du -sm "$VENV" 2>/dev/null | cut -f1) MB installed"; done
}

[ -f "$STAMP" ] && [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ] && exit 0
if [ -e "$BUSY" ] && kill -0 "$(cat "$BUSY")" 2>/dev/null; then
  die "another set-up is running here (process $(cat "$BUSY")); wait for it."
fi

start=$(date +%s)
rm -f "$STAMP"
if [ -e "$BUSY" ]; then say "Set-up: the last installation was interrupted; starting afresh."; make_venv
elif ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then make_venv
elif ! at_home; then say "Set-up: this folder was moved, which no environment survives; making it again."; make_venv
fi
echo $$ >"$BUSY"
mkdir -p "$VENV/tmp"
say "Set-up: installing the versions of constraints.txt (first time: some minutes, about 6 GB, most of it torch)"
progress & ticker=$!
trap 'kill $ticker 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
# Downloads go to this disk as well, because /tmp is often small. The constraints are a relative path because pip
# splits that variable at spaces; as a variable they also hold for the tools that build the package.
if TMPDIR="$PWD/$VENV/tmp" PIP_CONSTRAINT=constraints.txt "$VENV/bin/python" -m pip install --quiet --no-input \
  --disable-pip-version-check --progress-bar off --no-compile -e '.[book,test,workflow]' >"$LOG" 2>&1; then
  rm -rf "$VENV/tmp" "$BUSY"
  fingerprint >"$STAMP"
  say "Set-up: done in $(($(date +%s) - start)) s."
else
  tail -n 15 "$LOG" >&2
  # pip downloads everything before it installs anything: only a full disk leaves half a package behind
  grep -q 'No space left' "$LOG" || rm -f "$BUSY"
  die "the installation failed (whole log: $LOG). Run the same command again once the cause is mended."
fi
