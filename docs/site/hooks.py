"""The site's additions to MkDocs: its pages, links between them, formulas.

Pages keep the paths that they have in the repository, so that links work here and there. Besides
the Markdown files, there is a page per method (`methods`), the reference (`public_names`), the
notebooks (`notebooks`), a list of the records, and each source file that a page links to.
"""

from __future__ import annotations

import html
import logging
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import latex2mathml.converter
import methods
import notebooks
import public_names
from mkdocs.structure.files import File, Files

LOG = logging.getLogger("mkdocs.hooks")
ROOT = Path(__file__).resolve().parents[2]
PAGES = ("*.md", "docs/**/*.md", "benchmarks/results/**/*.md", "clients/*.md")
ASSETS = ("benchmarks/results/**/*.png", "docs/site/*.css", "docs/site/*.js")
# The weight of pages in the search, by the start of their paths; 1 for others.
RANKS = {
    "docs/start.md": 100.0,
    "docs/migrating/": 1.0,
    "docs/faq.md": 20.0,
    "docs/": 10.0,
    "methods/": 20.0,
    **dict.fromkeys(("benchmarks/", "clients/", "examples/"), 1e-6),
    **dict.fromkeys(("optimizers/", "tests/", "transforms/"), 1e-6),
}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
CODE = re.compile(r"(```.*?```)", re.DOTALL)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
GAP = re.compile(r"\\q?quad\b(?![^{]*\})")
HREF = re.compile(r'(?:href|src)="((?!#|[a-z]+:)[^"]+)"')
NAME = re.compile(r"(?<![\[`])`curvax\.([\w.]+)`(?!`)")


def on_config(config: Any) -> Any:
    """The version beside the name, the methods in the menu.

    Tables that are not their records' are warnings.
    """
    command = [sys.executable, "-m", "benchmarks", "pages", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    for line in done.stderr.strip().splitlines() if done.returncode else ():
        LOG.warning(line)
    if missing := public_names.missing():
        LOG.warning("add to a group of docs/site/public_names.py: %s", ", ".join(missing))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    next(x["Methods"] for x in config.nav if "Methods" in x).extend(methods.menu())
    config.site_name = f"curvax {project['version']}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """All pages under their paths in the repository, and those that are generated."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    texts = {path: (ROOT / path).read_text() for path in _paths(PAGES)}
    texts |= methods.pages() | public_names.pages() | notebooks.pages()
    linked = {target for path, text in texts.items() for target in _targets(path, text)}
    for path in linked - set(texts):
        if (ROOT / path).is_dir():
            texts[f"{path}/index.md"] = _listing(path, texts)
        elif (ROOT / path).is_file() and Path(path).suffix != ".png":
            texts[f"{path}.md"] = f"# `{path}`\n\n```python\n{(ROOT / path).read_text()}```\n"
    made = [File.generated(config, path, content=text) for path, text in texts.items()]
    for path in _paths(ASSETS):
        made.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for path, content in (methods.figures() | notebooks.figures()).items():
        made.append(File.generated(config, path, content=content))
    return Files([*theme, *made])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to sources and folders lead to their pages; names of the library to the reference."""
    here = page.file.src_uri
    rank = next((rank for start, rank in RANKS.items() if here.startswith(start)), 1.0)
    page.meta["search"] = {"boost": rank}
    folder = os.path.dirname(here)

    def page_of(link: re.Match) -> str:
        before, target, after = link.groups()
        path = _joined(folder, target)
        if "://" not in target and (ROOT / path).is_dir():
            target += "/index.md"
        elif "://" not in target and (ROOT / path).is_file() and not _is_page(path):
            target += ".md"
        return before + target + after

    def name_of(found: re.Match) -> str:
        name = found[1]
        return f"[`curvax.{name}`][curvax.{name}]" if name in public_names.names() else found[0]

    parts = CODE.split(markdown)
    prose = [NAME.sub(name_of, LINK.sub(page_of, part)) for part in parts[::2]]
    return "".join(x for pair in zip(prose, [*parts[1::2], ""], strict=True) for x in pair)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers show without scripts."""

    def mathml(found: re.Match) -> str:
        tex = html.unescape(found[3]).strip()
        if found[2] == "(":
            return latex2mathml.converter.convert(tex)
        parts = [
            latex2mathml.converter.convert(part, display="block")
            for part in GAP.split(tex)  # formulas side by side, where there is room
            if part.strip()
        ]
        return f'<div class="formulas">{"".join(parts)}</div>'

    return FORMULA.sub(mathml, content)


def on_post_build(config: Any) -> None:
    """Every link within the site leads to a file, those of docstrings too."""
    site = Path(config.site_dir)
    for page in site.rglob("*.html"):
        for link in HREF.findall(page.read_text()):
            target = unquote(link.split("#")[0].split("?")[0])
            if page.name != "404.html" and not (page.parent / target).exists():
                LOG.warning("%s links to %s, which does not exist", page.relative_to(site), link)


def _paths(patterns: tuple[str, ...]) -> list[str]:
    found = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
    return [path.relative_to(ROOT).as_posix() for path in found]


def _joined(folder: str, target: str) -> str:
    return os.path.normpath(os.path.join(folder, target))


def _is_page(path: str) -> bool:
    return Path(path).suffix in (".md", ".png", ".svg")


def _targets(path: str, text: str) -> set[str]:
    """The files of the repository that a page links to."""
    prose = "".join(CODE.split(text)[::2])
    links = {target for _, target, _ in LINK.findall(prose) if "://" not in target}
    return {_joined(os.path.dirname(path), target) for target in links}


def _listing(folder: str, texts: dict[str, str]) -> str:
    """The page of a folder: the pages in it, by their titles."""
    inside = sorted(path for path in texts if path.startswith(f"{folder}/"))
    lines = [
        f"- [{texts[path].splitlines()[0].lstrip('# ')}]({os.path.relpath(path, folder)})"
        for path in inside
    ]
    return "\n".join([f"# {folder}", "", *lines, ""])
