"""Configs and reports for the tests of the plan."""

from __future__ import annotations

import pytest
from plans import Plans


@pytest.fixture
def plans() -> Plans:
    return Plans()
