#!/bin/sh
# Nothing to install: the submission needs torch and numpy alone, and the contest has them.
set -eu
