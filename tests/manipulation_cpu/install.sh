#!/usr/bin/env bash
# Meta-World and Gymnasium-Robotics with their MuJoCo 3.3 into a new virtual environment in the second folder. The other
# packages are links to those of the first folder, a virtual environment with the platform.
set -euo pipefail
platform=${1:?the virtual environment of the platform}
folder=${2:?the folder of the new virtual environment}
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
theirs=$(packages "$platform")
python3 -m venv "$folder"
own=$(packages "$folder")
for package in "$theirs"/*; do
  name=${package##*/}
  if [[ $name != mujoco* && ! -e $own/$name ]]; then ln -s "$package" "$own/$name"; fi
done
"$folder/bin/pip" install -q --no-deps mujoco==3.3.0 metaworld==3.1.1 gymnasium-robotics==1.4.2 \
  imageio==2.37.3 scipy pettingzoo==1.25.0
"$folder/bin/python" -c 'import gymnasium_robotics, metaworld, mujoco; assert mujoco.__version__ == "3.3.0"'
