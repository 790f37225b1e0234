"""One notation for the many ways in which LaTeX, Markdown and Unicode write the same answer."""

from __future__ import annotations

import re

_SAME = {  # pattern -> the notation that is read
    r"\\left\b|\\right\b|\\displaystyle\b|\\!|\*\*|\\bigl?\b|\\bigr\b": "",
    r"(?<=\d)(?:\\,|\{,\}|\\ )(?=\d{3}(?!\d))": ",",  # thousands
    r"(?<!\\)\\[,;: ]|(?<=[\w}])~(?=[\w\\])|\N{NO-BREAK SPACE}": " ",
    r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\b\s*\{([^{}]*)\}": r" \1 ",
    r"\\[dt]frac\b": r"\\frac",
    r"\\frac\s*(\d)\s*(\d)(?!\d)": r" \1/\2",
    r"\\frac\s*\{\s*(-?[\d.]+)\s*\}\s*\{\s*([\d.]+)\s*\}": r" \1/\2",
    r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b|\N{MASCULINE ORDINAL INDICATOR}": "\N{DEGREE SIGN}",
    r"\N{DEGREE SIGN}\s*C\b": "\N{DEGREE SIGN} celsius",
    r"\N{DEGREE SIGN}\s*F\b": "\N{DEGREE SIGN} fahrenheit",
    r"(?<![A-Za-z])mph\b": " miles per hour",
    r"\\([%$#&])": r"\1",
    r"\\q?quad\b": ", ",
    r"\s+\^": "^",
    r"\\colon\b": ":",
    r"\\(?:leqslant|leq?)\b|\N{LESS-THAN OR EQUAL TO}": "<=",
    r"\\(?:geqslant|geq?)\b|\N{GREATER-THAN OR EQUAL TO}": ">=",
    r"\\neq?\b|\N{NOT EQUAL TO}": "!=",
    r"\\lt\b": "<",
    r"\\gt\b": ">",
    r"\N{MULTIPLICATION SIGN}|\\times\b": r"\\times ",
    "\N{MINUS SIGN}": "-",
    "\N{SUPERSCRIPT TWO}": "^2",
    "\N{SUPERSCRIPT THREE}": "^3",
    r"\N{INFINITY}": r"\\infty",
    r"\N{UNION}": r"\\cup ",
}
_SAME_PATTERNS = [(re.compile(pattern), same) for pattern, same in _SAME.items()]
_FRAMES = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("`", "`"))


def normalized(text: str) -> str:
    """Returns the answer without math delimiters, spacing commands and a full stop at its end."""
    text = text.strip()
    for _ in _FRAMES:
        text = text.removesuffix(".").rstrip()
        for start, end in _FRAMES:
            inner = text[len(start) : -len(end)]
            if text.startswith(start) and text.endswith(end) and len(text) >= len(start + end) and "$" not in inner:
                text = inner.strip()
    for pattern, same in _SAME_PATTERNS:
        text = pattern.sub(same, text)
    return " ".join(text.split())
