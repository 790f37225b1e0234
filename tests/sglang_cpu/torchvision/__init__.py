"""SGLang imports the processors of its vision models; an engine of a language model runs none."""

import enum

import hollow

hollow.hollow_out("torchvision", __version__="0.0.0")

import torchvision.transforms  # noqa: E402
import torchvision.transforms.functional  # noqa: E402
import torchvision.transforms.v2.functional  # noqa: E402

_NAMES = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")
InterpolationMode = enum.Enum("InterpolationMode", {name.upper().replace("-", "_"): name for name in _NAMES})
for module in (
    torchvision.transforms,
    torchvision.transforms.functional,
    torchvision.transforms.v2,
    torchvision.transforms.v2.functional,
):
    module.InterpolationMode = InterpolationMode
