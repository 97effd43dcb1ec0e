"""Reading what `report` prints."""


def table(text: str) -> dict[str, dict[str, str]]:
    """The cells by parameter and column."""
    titles, _, *rows = ([c.strip() for c in x.strip("|").split("|")] for x in text.splitlines())
    return {cells[0]: dict(zip(titles[1:], cells[1:], strict=True)) for cells in rows}
