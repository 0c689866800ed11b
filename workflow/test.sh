#!/bin/sh
# The regression suite: the package is what the notebooks export, the notebooks' own tests, and what crosses notebooks.
set -eu
export PYTHONHASHSEED=0 HF_HUB_OFFLINE=1
echo "== export drift"
python tests/check_drift.py
echo "== notebooks"
# the batch runs nbs/runs and nbs/papers; tests/test_pipeline.py does so on a small profile
nbdev-test --n-workers 2 --skip-folder-re '^[_.]|^papers$|^runs$'
echo "== tests"
exec python -m pytest -q tests
