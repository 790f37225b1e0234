"""Texts and videos for experiment loggers: TensorBoard and Weights & Biases."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import wandb
    from tensorboard.compat.proto.summary_pb2 import Summary

_PICTURES = 100  # of an animation, at most
_WIDTH = 320  # pixels, at most


def as_markdown(records: Sequence[Mapping[str, object]]) -> str:
    """Returns the records one below the other, each value indented as code, so that nothing in it is markup."""
    parts = []
    for record in records:
        for name, value in record.items():
            indented = "\n".join(f"    {line}" for line in str(value).splitlines())
            parts.append(f"**{name}**\n\n{indented}")
        parts.append("---")
    return "\n\n".join(parts[:-1])


def as_table(records: Sequence[Mapping[str, object]]) -> wandb.Table:
    """Returns a Weights & Biases table: a row per record, a column per key of any record."""
    import wandb

    columns = list(dict.fromkeys(name for record in records for name in record))
    return wandb.Table(columns=columns, data=[[record.get(name) for name in columns] for record in records])


def as_video(video: Path) -> wandb.Video:
    """Returns an MP4 file as a video of Weights & Biases."""
    import wandb

    return wandb.Video(str(video), format="mp4")


def as_animation(video: Path) -> Summary:
    """Returns an image for TensorBoard that moves: it shows GIF files, and no others that do."""
    import imageio.v2 as imageio
    from tensorboard.compat.proto.summary_pb2 import Summary

    reader = imageio.get_reader(video, format="FFMPEG")
    with reader:
        rate, pictures = float(reader.get_meta_data()["fps"]), list(reader.iter_data())
    every = -(-len(pictures) // _PICTURES)
    smaller = -(-pictures[0].shape[1] // _WIDTH)
    shown = [picture[::smaller, ::smaller] for picture in pictures[::every]]
    file = io.BytesIO()
    imageio.mimwrite(file, shown, format="GIF", duration=1000 * every / rate, loop=0)
    height, width = shown[0].shape[:2]
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=file.getvalue())
    return Summary(value=[Summary.Value(tag="evaluation", image=image)])
