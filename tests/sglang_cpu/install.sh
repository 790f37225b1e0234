#!/usr/bin/env bash
# SGLang for the CPU into the virtual environment given, beside what is there. Its own requirements name CUDA builds, so
# they are not followed; constraints/sglang-cpu.txt has what a CPU engine needs.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python="${1:?the folder of a virtual environment}/bin/python"
declare -F pip_install > /dev/null || pip_install() { "$1" -m pip install -q "${@:2}"; }  # .ci/run exports a faster one
pip_install "$python" -c "$here/constraints/cpu.txt" -r "$here/constraints/sglang-cpu.txt"
pip_install "$python" --no-deps sglang==0.5.23 compressed-tensors==0.18.0 xgrammar==0.2.7
