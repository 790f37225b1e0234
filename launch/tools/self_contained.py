"""HTML files that need nothing else: data as JSON inside the page, and its own script, which alone may run."""

from __future__ import annotations

import base64
import hashlib
import json

SCRIPT = '<script>\n"use strict"'  # the beginning of the page's script


def filled(template: str, data: object) -> str:
    """Returns a template with its data and the hash of its script in place of `@DATA@` and `@HASH@`.

    Texts in `data` never become markup: the JSON holds no `<`. NaN is refused with ValueError.
    """
    script = template[template.index(SCRIPT) + len("<script>") : template.rindex("</script>")]
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # without `<` the text cannot end the script element it is in, whatever it holds
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("@HASH@", hashed, 1).replace("@DATA@", text, 1)
