"""No family ends in anything but equal tokens, a refusal by name, or no tiny model; and the page
that says so knows every family of the transformers that is installed."""

from __future__ import annotations

import re

import pytest
import transformers

from tests.families.table import NAMES, PAGE, outcomes
from tests.families.trial import EQUAL, IMPOSSIBLE, REFUSED


def _rows() -> dict[str, str]:
    """The page's outcome of every family."""
    found = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]*\|$", PAGE.read_text(), re.MULTILINE)
    return {name: outcome for name, outcome in found if name in NAMES}


def test_the_page_lists_every_family():
    """transformers has new families, and nobody knows what becomes of them: make it again, by
    `python -m tests.families.table`."""
    text = PAGE.read_text()
    made_with = re.search(r"with transformers ([0-9.]+[0-9])", text)
    assert made_with is not None
    if made_with[1] != transformers.__version__:
        pytest.skip(f"the page was made with transformers {made_with[1]}")
    rows = _rows()
    assert sorted(rows) == sorted(NAMES)
    assert set(rows.values()) <= {EQUAL, REFUSED, IMPOSSIBLE}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_equal_or_refused_by_name(name):
    """A crash, a ready model whose requests fail, or other tokens than transformers gives."""
    ((_, outcome),) = outcomes([name])
    if outcome.result == REFUSED:
        kind = re.match(r"[\w.-]+", name)
        assert kind is not None
        assert outcome.reason.startswith(kind[0]), outcome.reason
    assert outcome.result in (EQUAL, REFUSED, IMPOSSIBLE), outcome.reason
    assert _rows().get(name) == outcome.result, "docs/models.md says otherwise: make it again"
