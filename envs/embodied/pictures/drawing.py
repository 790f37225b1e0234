"""Selects a graphics library for rendering without a screen. Libraries run in worker processes, as they may crash."""

from __future__ import annotations

import importlib.util
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rl_platform.errors import PlatformError

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

    from rl_platform.envs.embodied.spaces import AnyEnv

# in order of preference: EGL of the GPU or Mesa, then software
_HEADLESS = ("egl", "osmesa")
_SHADOW_SIZE = 1024
_LINE, _MARGIN = 14, 4  # pixels of a caption
_NARROWEST = 100  # pixels of a picture with a caption: `return -1.234e+04` and most words fit
# for what the font of Pillow lacks, which has English letters only; Pillow finds files by name in the system's folders
_FONTS = ("DejaVuSans.ttf", "NotoSansCJK-Regular.ttc", "NotoSansCJK-Regular.otf", "wqy-zenhei.ttc", "Arial Unicode.ttf")
_FONT_SIZE = 11
_NO_CHARACTER = "\U0010ffff"  # drawn as any character that a font lacks

Result = TypeVar("Result")


class CannotDraw(Exception):
    """No library worked; the message has the error of each."""


def with_drawing(uses_mujoco: bool, start: Callable[[dict[str, str]], Result]) -> Result:
    """Returns the result of `start`, called with the environment variables of the first library that works.

    A MUJOCO_GL that is set is used as it is. Raises CannotDraw if no library works.
    """
    notes = []
    for variables in _drawing_variables(uses_mujoco):
        try:
            return start(variables)
        except (PlatformError, ImportError, OSError, RuntimeError) as error:
            setting = ", ".join(f"{name}={value}" for name, value in variables.items() if name == "MUJOCO_GL")
            notes.append(f"{setting}: {_last_line(error)}" if setting else _last_line(error))
    raise CannotDraw("; ".join(notes))


def with_captions(pictures: Iterable[np.ndarray], texts: Sequence[str]) -> Iterator[np.ndarray]:
    """Yields the pictures [height,width,3] with their captions, all in the size of the one with the most lines.

    A video needs pictures of one size, and captions of a narrow picture differ in their number of lines.
    """
    lines = 0
    for picture, text in zip(pictures, texts, strict=False):  # the pictures of a drawing that is stopped are fewer
        lines = lines or max(len(caption_lines(each, _captioned_width(picture))) for each in texts)
        yield with_caption(picture, text, lines)


def with_caption(picture: np.ndarray, text: str, num_lines: int = 0) -> np.ndarray:
    """Returns the picture [height,width,3] with `text` in white on black under it, in lines that fit its width.

    A picture too narrow for the words of a caption gets a black margin at its right. num_lines: the least of them.
    Characters that no font of this machine has are drawn as escapes.
    """
    from PIL import Image, ImageDraw

    width = _captioned_width(picture)
    lines, font = caption_lines(text, width), _font(_unusual(text))[0]
    strip = Image.new("RGB", (width, max(len(lines), num_lines) * _LINE + 2 * _MARGIN))
    draw = ImageDraw.Draw(strip)
    for number, line in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + number * _LINE), line, fill="white", font=font)
    widened = np.pad(picture, ((0, 0), (0, width - picture.shape[1]), (0, 0)))
    return np.concatenate([widened, np.asarray(strip)])


def caption_lines(text: str, width: int) -> list[str]:
    """Returns `text` in lines that fit `width` pixels. Parts stand two spaces apart; a long part is broken at words,
    and a long word, as a sentence in Chinese, at characters."""
    room, (font, lacking) = width - 2 * _MARGIN, _font(_unusual(text))
    text = "".join(_escaped(each) if each in lacking else each for each in text)
    lines = [""]
    for part in text.split("  "):
        words = [part] if font.getlength(part) <= room else part.split(" ")
        for number, word in enumerate(words):
            longer = f"{lines[-1]}{' ' if number else '  '}{word}".lstrip()
            if lines[-1] and font.getlength(longer) > room:
                lines.append(word)
            else:
                lines[-1] = longer
            while len(line := lines[-1]) > 1 and font.getlength(line) > room:
                fitting = _fitting(line, room, font)
                lines[-1:] = line[:fitting], line[fitting:]
    return lines


def _fitting(line: str, room: int, font: FreeTypeFont | ImageFont) -> int:
    """Returns how many characters of `line` fit, at least one."""

    def length(end: int) -> float:
        return font.getlength(line[:end])

    return max(bisect_right(range(1, len(line)), float(room), key=length), 1)


def _unusual(text: str) -> frozenset[str]:
    """Returns the characters of `text` other than those of ASCII that can be printed."""
    return frozenset(each for each in text if not (each.isascii() and each.isprintable()))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()


@cache
def _font(characters: frozenset[str]) -> tuple[FreeTypeFont | ImageFont, frozenset[str]]:
    """Returns the font of this machine that has most of the characters, and those that it lacks."""
    from PIL.ImageFont import load_default, truetype

    best: FreeTypeFont | ImageFont = load_default()
    lacking = frozenset(each for each in characters if not _has(best, each))
    if lacking:
        own = importlib.util.find_spec("matplotlib")
        folder = Path(own.origin).parent / "mpl-data" / "fonts" / "ttf" if own and own.origin else Path()
        for name in (str(folder / _FONTS[0]), *_FONTS):
            with suppress(OSError, ImportError):  # not on this machine
                font = truetype(name, _FONT_SIZE)
                missing = frozenset(each for each in characters if not _has(font, each))
                if len(missing) < len(lacking):
                    best, lacking = font, missing
    return best, lacking


def _has(font: FreeTypeFont | ImageFont, character: str) -> bool:
    """Returns whether a font draws a character otherwise than one that it lacks."""
    if not character.isprintable():
        return False
    drawn, lacking = (bytes(font.getmask(each)) for each in (character, _NO_CHARACTER))
    return drawn != lacking


def _captioned_width(picture: np.ndarray) -> int:
    width: int = picture.shape[1]
    return max(width, _NARROWEST)


def draw_quickly(env: AnyEnv) -> None:
    """Makes software rendering of a MuJoCo environment three times as fast, without a visible difference in videos.

    Called before the first picture. Shadow maps of MuJoCo's size and multisampling take most of the time.
    """
    if (visual := getattr(getattr(env.unwrapped, "model", None), "vis", None)) is not None:
        visual.quality.shadowsize, visual.quality.offsamples = min(visual.quality.shadowsize, _SHADOW_SIZE), 0


def follow_robot(env: AnyEnv) -> None:
    """Selects the model's camera `track` for a MuJoCo environment whose default camera would stand still.

    Gymnasium 1.4 replaces that camera by a free one, out of whose picture HalfCheetah, Ant and Swimmer run.
    """
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    if renderer is None or renderer.camera_id != -1 or "trackbodyid" in (renderer.default_cam_config or {}):
        return
    import mujoco

    renderer.camera_id = mujoco.mj_name2id(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")  # -1: has none


def _drawing_variables(uses_mujoco: bool) -> list[dict[str, str]]:
    """Returns the environment variables to try, in order."""
    if not uses_mujoco:
        return [{"SDL_VIDEODRIVER": "dummy"}]  # classic control draws with pygame
    if "MUJOCO_GL" in os.environ:
        return [{"MUJOCO_GL": os.environ["MUJOCO_GL"]}]
    return [{"MUJOCO_GL": library, "PYOPENGL_PLATFORM": library} for library in _HEADLESS]


def _last_line(error: Exception) -> str:
    """Returns the last line that is not indented, as values and hints of a problem are."""
    return ([line for line in str(error).splitlines() if line[:1].strip()] or [type(error).__name__])[-1]
