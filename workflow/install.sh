#!/bin/sh
# Make .venv and install the project into it. What goes wrong is said in one line; everything else is in .venv/install.log.
set -u
extras=${1:-models,images,run,dev}

say() { printf '%s\n' "$*"; }
fail() { printf 'install: %s\n' "$*" >&2; exit 1; }

good='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'
python=
for p in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
    if command -v "$p" >/dev/null 2>&1 && "$p" -c "$good" >/dev/null 2>&1; then python=$p; break; fi
done
[ -n "$python" ] || fail "no Python 3.11 or newer with venv was found: install one (on Debian also python3-venv), or name it: make PYTHON=/path/to/python3.11"

free=$(df -Pk . | awk 'NR==2 {print int($4 / 1048576)}')
if [ ! -d .venv/lib ] && [ "${free:-99}" -lt 10 ]; then
    say "install: only $free GB are free here; the environment takes about 7 GB on Linux (a CPU build of torch about 2): see README"
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv || fail "$python could not make .venv: see the lines above"
log=.venv/install.log
say "installing into .venv with $("$python" -V) (a few minutes, mostly torch; details in $log)"
: > "$log" || fail "cannot write $log: is the disk full?"
.venv/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off --retries 5 --timeout 60 \
    -c constraints.txt -e ".[$extras]" >> "$log" 2>&1
code=$?
if [ $code -ne 0 ]; then
    if grep -qi 'no space left' "$log"; then why="no disk space left: free some (about 7 GB are needed) and run make again"
    elif grep -qiE 'timed? ?out|connection|name resolution|max retries|incompleteread|ssl' "$log"; then why="a download broke or the package index was not reached: check the network and run make again (what came is kept)"
    elif grep -qi 'hashes' "$log"; then why="a downloaded file was not what it should be: run make again; if it stays, clear pip's cache (pip cache purge)"
    else why=$(grep -E '^ *(ERROR|error)' "$log" | tail -n 1); why="${why:-pip ended with $code}"; fi
    fail "$why [details: $log]"
fi
touch .venv/.ready
say "installed: $(.venv/bin/histchrono --version)"
