"""Tables of wrong calls: Python that raises a `ValueError`, and what its message names."""

from typing import Any

import pytest

from tests.helpers import assert_names, rejection


def wrong_calls(text: str) -> Any:
    """Parametrizes a test by lines `call -> fragments`, which ` | ` separates.

    The fragments may stand on a line of their own behind the arrow; `#` begins a heading.
    """
    lines = text.replace("->\n", "->").strip().splitlines()
    rows = [[x.strip() for x in line.split("->")] for line in lines if line[:1] not in ("", "#")]
    return pytest.mark.parametrize(("call", "fragments"), rows, ids=[call for call, _ in rows])


def assert_refused(call: str, fragments: str, names: dict[str, Any]) -> None:
    """Requires the message of a call, which reads `names`, to name all fragments."""
    assert_names(rejection(lambda: eval(call, names)), fragments)
