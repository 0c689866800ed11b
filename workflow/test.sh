#!/bin/sh
# The regression suite: the package is what the notebooks export, the notebooks' own tests, and what crosses notebooks.
set -eu
export PYTHONHASHSEED=0 HF_HUB_OFFLINE=1
echo "== export drift"
python tests/check_drift.py
echo "== notebooks"
nbdev-test --n-workers 2
echo "== tests"
exec python -m pytest -q tests
