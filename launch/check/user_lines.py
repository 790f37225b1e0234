"""The line of the user's code that an error came from, for messages of `--check`."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress

from rl_platform.user_code import is_of_user, relative

_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in ', re.MULTILINE)


def error_with_line(traceback: str, around: tuple[str, ...], code: object) -> str:
    """Returns the last line of a traceback's text, with the place in the user's code that raised.

    around: the folders whose frames call the user's code; code: the function or class to name if the error comes from
    them, because it returned something wrong.
    """
    error = traceback.strip().splitlines()[-1]
    places = [(path, line) for path, line in _FRAME.findall(traceback) if not path.startswith(around)]
    places = [place for place in places if is_of_user(place[0])] or places
    if places:
        return f"raised {error} (at {relative(places[-1][0])}:{places[-1][1]})"
    with suppress(OSError, TypeError):  # the source of a built-in function
        return f"{error} (of {relative(inspect.getsourcefile(code) or '')}:{inspect.getsourcelines(code)[1]})"  # type: ignore[arg-type]
    return error
