"""Docstrings as Markdown: formulas, links, and the arguments that all methods share.

A docstring has formulas and links in reStructuredText, `.. math::`, ``:math:`x` ``,
`` `text <url>`_ ``, and names of the library in backticks, which become links to their pages.
"matrices, mesh, ...: see `muon`" becomes the texts that `muon` has for these arguments.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

BLOCK = re.compile(r"^( *)\.\. math::\n((?:\1  +.*\n|\n)+)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")
LINK = re.compile(r"`([^`<]+?)\s*<([^<>\s]+)>`_+")
NAME = re.compile(r"(?<![`\[.\w])`(?:curvax\.)?([a-zA-Z_][\w.]*)`(?!`)")
GUIDE = re.compile(r"`?\b(docs/\w+)\.md`?")
ARGUMENTS = re.compile(r"(?m)^Args:\n((?:(?:  .*)?\n)+)")
ARGUMENT = re.compile(r"(?m)^  (?=\S)")


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of the package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrites all of them."""
        names = {name for name in pkg.exports or () if isinstance(name, str)}
        for module in (
            "eigenbases",
            "grafts",
            "polar",
            "policies",
            "rules",
            "subspaces",
            "weights",
        ):
            names |= {f"{module}.{name}" for name in pkg[module].exports or ()}
        names -= {"policies.every"}  # it has its place as curvax.every
        shared = arguments_of(pkg["muon"].docstring.value)
        for thing in functions_and_classes(pkg):
            if thing.docstring is not None:
                own = thing.name
                thing.docstring.value = markdown(thing.docstring.value, names - {own}, shared)


def functions_and_classes(module: griffe.Object) -> list[griffe.Object]:
    """All in a package, without aliases."""
    found = []
    for member in module.members.values():
        if not member.is_alias:
            found.append(member)
            if member.is_module or member.is_class:
                found += functions_and_classes(member)
    return found


def arguments_of(docstring: str) -> dict[str, str]:
    """The texts of the arguments, by name."""
    section = ARGUMENTS.search(docstring)
    if section is None:
        return {}
    found = {}
    for item in ARGUMENT.split(section[1])[1:]:
        names, text = re.split(r":\s", item, maxsplit=1)
        found |= {name.strip(): " ".join(text.split()) for name in names.split(",")}
    return found


def markdown(docstring: str, names: set[str], shared: dict[str, str]) -> str:
    """The docstring as Markdown."""

    def block(found: re.Match) -> str:
        indent, formula = found[1], textwrap.dedent(found[2]).strip()
        return f"{indent}$$\n{textwrap.indent(formula, indent)}\n{indent}$$\n\n"

    def name(found: re.Match) -> str:
        return f"[{found[0]}][curvax.{found[1]}]" if found[1] in names else found[0]

    def arguments(found: re.Match) -> str:
        own = arguments_of(found[0])
        lines = [
            f"  {key}: {shared.get(key, text) if text == 'see `muon`.' else text}\n"
            for key, text in own.items()
        ]
        return f"Args:\n{''.join(lines)}\n"

    text = ARGUMENTS.sub(arguments, docstring)
    text = re.sub(r"(?m)^Example:$", "Examples:", text)  # a section that shows code as code
    text = BLOCK.sub(block, text)
    text = INLINE.sub(r"$\1$", text)
    text = LINK.sub(r"[\1](\2)", text)
    text = GUIDE.sub(r"[\1](../\1.md)", text)
    parts = re.split(r"(?m)(^ *>>> .*(?:\n *\.\.\. .*)*)", text)
    return "".join(part if i % 2 else NAME.sub(name, part) for i, part in enumerate(parts))
