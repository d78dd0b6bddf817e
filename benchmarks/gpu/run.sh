#!/usr/bin/env bash
# Measures what needs a GPU, in 14 minutes: benchmarks/gpu/run.sh [parts, default all] [--data=FOLDER …], see --help
#
# REHEARSE=1 runs the same commands at a hundredth of the size on a CPU. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" -m benchmarks.gpu "$@"
