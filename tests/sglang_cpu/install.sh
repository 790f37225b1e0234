#!/usr/bin/env bash
# SGLang for the CPU into the virtual environment given, beside what is there. Its own requirements name CUDA builds, so
# they are not followed; constraints/sglang-cpu.txt has what a CPU engine needs.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python="${1:?the folder of a virtual environment}/bin/python"
"$python" -m pip install -q -c "$here/constraints/cpu.txt" -r "$here/constraints/sglang-cpu.txt"
"$python" -m pip install -q --no-deps sglang==0.5.23 compressed-tensors==0.18.0 xgrammar==0.2.7
