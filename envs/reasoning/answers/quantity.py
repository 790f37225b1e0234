"""Numbers with units: `1,234`, `-1/2`, `3.5 \\times 10^4`, `$18`, `50%`, `5 km/h`, `42 apples`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
UNITS = {  # dimension -> names of a unit: its size
    "length": {
        "mm millimeter": "0.001",
        "cm centimeter": "0.01",
        "m meter": "1",
        "km kilometer": "1000",
        "in inch inches": "0.0254",
        "ft foot feet": "0.3048",
        "yd yard": "0.9144",
        "mi mile": "1609.344",
    },
    "mass": {
        "mg milligram": "0.001",
        "g gram": "1",
        "kg kilogram kilo": "1000",
        "t ton tonne": "1000000",
        "lb lbs pound": "453.59237",
        "oz ounce": "28.349523125",
    },
    "time": {
        "ms millisecond": "0.001",
        "s sec secs second": "1",
        "min mins minute": "60",
        "h hr hrs hour": "3600",
        "day": "86400",
        "week": "604800",
    },
    "year": {"yr yrs year": "1", "month": "1/12"},
    "volume": {"ml mL milliliter": "0.001", "l L liter": "1", "gal gallon": "3.785411784"},
    "angle": {"\N{DEGREE SIGN} deg degree": "1"},
    "dollar": {"$ dollar usd USD buck": "1", "\N{CENT SIGN} cent": "0.01"},
    "euro": {"\N{EURO SIGN} euro eur EUR": "1"},
    "pound sterling": {"\N{POUND SIGN} gbp GBP": "1"},
    "newton": {"N newton": "1"},
    "joule": {"J joule": "1", "kJ kilojoule": "1000"},
    "watt": {"W watt": "1", "kW kilowatt": "1000"},
}
_KNOWN = {
    name: (dimension, Fraction(size))
    for dimension, units in UNITS.items()
    for names, size in units.items()
    for name in names.split()
}
_LONGEST_NUMBER = 1_000  # characters; Python refuses to read integers of more than 4,300 digits
_DIGITS = r"(?:\d{1,3}(?:[, ]\d{3})+(?!\d)|\d+)"
# A sign counts only where it cannot be an operator; commas only between groups of three digits.
NUMBER = re.compile(rf"(?:(?<![\w)\].])[-+])?(?:{_DIGITS.replace(', ', ',')}(?:\.\d+)?|\.\d+)(?:/\d+)?")
_QUANTITY = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?P<currency>[$\N{{EURO SIGN}}\N{{POUND SIGN}}]?)\s*(?P<minus>-?)
    (?:(?P<whole>\d+)\s+(?=\d+/))?(?P<number>{_DIGITS}\.?\d*|\.\d+)(?:\s?/\s?(?P<over>\d+))?
    (?:\s*(?:\\times|\*|\\cdot)\s*10\s*\^\s*\{{?(?P<power>-?\d{{1,3}})\}}?|[eE](?P<exponent>[-+]?\d{{1,3}}))?
    (?P<unit>\s*[^\d\s].*)?""",
    re.VERBOSE,
)
_FACTOR = re.compile(r"([^\W\d_]+|[$%\N{DEGREE SIGN}\N{CENT SIGN}\N{EURO SIGN}\N{POUND SIGN}])(?:\^\{?(-?\d)\}?)?")
_VARIABLES = re.compile(
    rf"(?!(?:{'|'.join(re.escape(name) for name in _KNOWN if len(name) > 1)}|percent)s?\b)[^\W\d_].*"
)
_PER = re.compile(r"\s*(?:/|\bper\b)\s*")
_PRODUCT = re.compile(r"\s+|\s*(?:\*|\\cdot)\s*|-")
_PLURAL = re.compile(r"(?:(?<=[sxz])|(?<=[cs]h))es$|(?<!s)s$")
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "squared": 2, "cubed": 3}
_MOST_FACTORS, _LARGEST_POWER = 6, 9
Unit = frozenset[tuple[str, int]]  # (dimension or word, power)


@dataclass(frozen=True)
class Quantity:
    """`number` times a unit of `size` base units. In `number`, words such as million and a percent sign are applied."""

    number: Fraction
    size: Fraction
    unit: Unit
    percent: bool
    is_quotient: bool  # written with a division

    def equals(self, given: Quantity) -> bool:
        """Returns whether `given` answers this expected quantity. One of the two may lack its unit or its percent
        sign."""
        if given.is_quotient and self.number.denominator == 1 and not self.percent:
            return False  # a calculation, not its result
        if self.unit and given.unit:
            return self.unit == given.unit and self.number * self.size == given.number * given.size
        if (self.percent and given.unit) or (given.percent and self.unit):
            return False
        scale = 100 if given.percent and not self.percent else Fraction(1, 100) if self.percent > given.percent else 1
        return self.number in (given.number, given.number * scale)


def parse_quantity(text: str) -> Quantity | None:
    """Parses a number with or without a unit, in the notation of `normalized`; returns None for other text."""
    parts = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if parts is None or (parts["over"] and not int(parts["over"])):
        return None
    if _VARIABLES.fullmatch(parts["unit"] or ""):
        return None
    unit = _parse_unit(f"{parts['currency']} {parts['unit'] or ''}")
    if unit is None:
        return None
    scale, size, factors, percent = unit
    number = Fraction(re.sub("[, ]", "", parts["number"]).removesuffix(".")) / int(parts["over"] or 1)
    number += int(parts["whole"] or 0)
    number *= Fraction(10) ** int(parts["power"] or parts["exponent"] or 0)
    if "-" in parts["sign"] + parts["minus"]:
        number = -number
    return Quantity(number * scale, size, factors, percent, bool(parts["over"]) and not parts["whole"])


def is_scale(word: str) -> bool:
    """Returns whether a word after a number multiplies it."""
    return word in ("%", "percent") or _singular(word) in SCALES


def is_unit(word: str) -> bool:
    """Returns whether a word is the name of a unit."""
    return word in _KNOWN or _singular(word) in _KNOWN


def _parse_unit(text: str) -> tuple[Fraction, Fraction, Unit, bool] | None:
    """Returns the scale, the size, the dimensions and whether it is percent; None for what is no unit."""
    factors = _unit_factors(text)
    if factors is None or len(factors) > _MOST_FACTORS or any(abs(power) > _LARGEST_POWER for _, power in factors):
        return None
    scale = size = Fraction(1)
    powers: Counter[str] = Counter()
    for word, power in factors:
        singular = _singular(word)
        if word in ("%", "percent"):
            scale /= 100
        elif singular in SCALES:
            scale *= SCALES[singular]
        elif len(word) == 1 and word not in _KNOWN:
            return None  # a variable
        else:
            dimension, unit_size = _KNOWN.get(word) or _KNOWN.get(singular, (singular, Fraction(1)))
            powers[dimension] += power
            size *= unit_size**power
    dimensions = frozenset((name, power) for name, power in powers.items() if power)
    return scale, size, dimensions, any(word in ("%", "percent") for word, _ in factors)


def _unit_factors(text: str) -> list[tuple[str, int]] | None:
    """Returns the words of a unit and their powers, those after `per` or `/` negative."""
    factors: list[tuple[str, int]] = []
    for index, product in enumerate(_PER.split(text.strip())):
        power = 1
        for token in _PRODUCT.split(product) if product else ():
            match = _FACTOR.fullmatch(token)
            if match is None:
                return None
            word = match[1]
            if word in ("squared", "cubed") and factors:
                factors[-1] = (factors[-1][0], factors[-1][1] * _POWERS[word])
            elif word in _POWERS:
                power = _POWERS[word]
            else:
                factors.append((word, (-1 if index else 1) * power * int(match[2] or 1)))
                power = 1
    return factors


def _singular(word: str) -> str:
    return _PLURAL.sub("", word.lower()).replace("metre", "meter").replace("litre", "liter")


def parse_number(text: str) -> Fraction | None:
    """Parses `1,234`, `-0.5`, `+3` or `1/2`, also in $...$ or with a full stop; returns None for other text."""
    bare = text.strip().strip("$").strip().removesuffix(".")
    if len(bare) > _LONGEST_NUMBER or not NUMBER.fullmatch(bare):
        return None
    numerator, _, denominator = bare.replace(",", "").partition("/")
    if denominator and not int(denominator):
        return None
    return Fraction(numerator) / int(denominator or 1)
