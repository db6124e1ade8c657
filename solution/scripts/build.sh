#!/bin/sh
# Nothing to compile: check that the archive arrived whole.
set -eu
cd "$(dirname "$0")/.."
test -f solution.py
test -f protonet/fit/solver.py
