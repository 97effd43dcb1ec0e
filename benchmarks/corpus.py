"""Text that packages of Debian ship, as tokens, for the models of `gpu`.

    pip install -e ".[corpus]"
    python -m benchmarks corpus                       # runs/corpus.npz; needs apt-get and dpkg-deb
    python -m benchmarks corpus --packages folder     # of .deb files that are there already

*Prose* is documentation and dictionaries, *code* is Python. Every package is in Debian's main
section, so all of its text may be used and passed on; the file says the licences. Only paragraphs
of HTML and markup are prose: at least 80 characters, mostly letters, with as many common English
words as sentences have. No paragraph comes twice, nor a block of code of more than 200 characters.
One file in 64 is held out, chosen by its name.

A byte-level BPE of 32,000 symbols is trained on a fifth of the text. The file has the tokens as
uint16, compressed, and names their sources; nobody has to fetch it.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from . import _record

PLACE = Path("runs", "corpus.npz")
VOCABULARY = 32000
HELD_OUT, SAMPLE = 64, 5  # one file of so many
MOST = {"prose": 34_000_000, "code": 6_000_000}  # tokens: with the checkout they fit in 64 MiB

PROSE = """
anarchism apache2-doc bind9-doc clang-14-doc cmake-doc cppreference-doc-en-html debian-handbook
debian-history debian-policy debian-reference-en developers-reference dict-devil dict-foldoc
dict-gcide dict-jargon dict-wn erlang-doc exim4-doc-html gap-doc ghc-doc gimp-help-en git-doc
gnome-user-docs installation-guide-amd64 libboost1.81-doc libreoffice-help-en-us lilypond-doc-html
linux-doc-6.1 llvm-14-doc maxima-doc nodejs-doc octave-doc openjdk-17-doc perl-doc
postgresql-doc-15 python-astropy-doc python-django-doc python-pandas-doc python-scipy-doc
python-sklearn-doc python-sqlalchemy-doc python-statsmodels-doc python-sympy-doc python3.11-doc
r-doc-html rust-doc sagemath-doc zsh-doc
"""
CODE = """
libpython3.11-stdlib python3-django python3-matplotlib python3-numpy python3-scipy
python3-sqlalchemy python3-sympy
"""
TEXTS = {".html", ".htm", ".xhtml", ".page", ".xml", ".txt", ".rst", ".pod", ".md", ".dz", ".info"}
MARKUP = {".html", ".htm", ".xhtml", ".page", ".xml"}
HIDDEN = re.compile(r"(?is)<(script|style|pre|head|nav)\b.*?</\1>|<!--.*?-->")
BREAK = re.compile(r"(?i)</?(p|div|li|ul|ol|dl|dd|dt|h\d|br|hr|section|article|tr|td|body)\b[^>]*>")
TAG = re.compile(r"<[^<>]*>")
WORDS = "the of to and a in is that for it be as are with this by or on not an if can"
COMMON = set(WORDS.split())
WORD = re.compile(r"[a-z]+")
LEAST = 80  # characters of a paragraph
BLOCK = 200  # characters of code that may not come twice
CAP = 12_000_000  # bytes that are taken of a package
BATCH = 256  # documents that are encoded at once


class Document(NamedTuple):
    """A file's own text."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether it is for validation."""
        return hashlib.sha256(self.name.encode()).digest()[0] % HELD_OUT == 0


def unpacked(packages: Path, name: str) -> tuple[Path, str]:
    """The folder with the files of a package, downloaded if it is not there; its version."""
    packages.mkdir(parents=True, exist_ok=True)
    if not (found := sorted(packages.glob(f"{name}_*.deb"))):
        subprocess.run(["apt-get", "download", "-q", name], cwd=packages, check=True)
        found = sorted(packages.glob(f"{name}_*.deb"))
    folder = packages / name
    if not folder.exists():
        part = packages / f"part-{name}"  # a torn folder never has the name
        subprocess.run(["dpkg-deb", "-x", found[-1], part], check=True)
        part.rename(folder)
    return folder, found[-1].name.split("_")[1].replace("%3a", ":")


def read(path: Path) -> str:
    """A file's text, unpacked; empty if it is torn."""
    try:
        packed = path.suffix in (".gz", ".dz")
        data = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
        return data.decode(errors="ignore")
    except (OSError, EOFError):
        return ""


def paragraphs(path: Path) -> Iterator[str]:
    """English sentences of a page, each paragraph on a line of its own."""
    text = read(path)
    if path.suffix in MARKUP or path.suffixes[-2:-1] == [".html"]:
        text = html.unescape(TAG.sub("", BREAK.sub("\n\n", HIDDEN.sub("\n\n", text))))
    entries = r"\n(?=\S)" if path.suffix == ".dz" else r"\n\s*\n"  # dictionaries indent the rest
    for part in re.split(entries, text):
        part = " ".join(part.split())
        if len(part) < LEAST or sum(c.isalpha() or c == " " for c in part) < 0.85 * len(part):
            continue
        words = WORD.findall(part.lower())
        if sum(word in COMMON for word in words) >= max(2, 0.2 * len(words)):
            yield part


def documents(kind: str, folder: Path, seen: set[bytes], counts: dict[str, int]) -> Iterator[Any]:
    """The files of a package, without paragraphs of others, and in `counts` the bytes that were
    left."""
    taken = 0
    for path in sorted(folder.rglob("*")):
        plain = path.with_suffix("") if path.suffix == ".gz" else path
        wanted = plain.suffix == ".py" if kind == "code" else plain.suffix in TEXTS
        if not wanted or not path.is_file() or path.is_symlink() or "/test" in str(path):
            continue
        if taken >= CAP:
            break
        parts = read(path).split("\n\n") if kind == "code" else paragraphs(path)
        own = []
        for part in parts:
            counts["bytes"] += (size := len(part.encode()))
            told = part if kind == "code" else "".join(WORD.findall(part.lower()))
            digest = hashlib.blake2b(told.encode(), digest_size=12).digest()
            if digest in seen and (kind == "prose" or size > BLOCK):
                counts["repeated"] += size
                continue
            seen.add(digest)
            own.append(part)
            if (taken := taken + size) >= CAP:
                break
        if text := ("\n\n" if kind == "code" else "\n").join(own).strip():
            yield Document(str(path.relative_to(folder)), text)


def licences(folder: Path) -> list[str]:
    """The licences in the copyright file of a package, if it has Debian's format."""
    texts = [path.read_text(errors="ignore") for path in folder.rglob("usr/share/doc/*/copyright")]
    return sorted({x for text in texts for x in re.findall(r"(?m)^License: *(\S.*)", text)})


def gathered(kind: str, packages: Path) -> tuple[list[Document], dict[str, Any]]:
    """All documents of prose or of code in random order, and their sources."""
    found: list[Document] = []
    seen: set[bytes] = set()
    counts = {"bytes": 0, "repeated": 0}
    origin: dict[str, Any] = {}
    for name in tqdm((PROSE if kind == "prose" else CODE).split(), desc=kind):
        folder, version = unpacked(packages, name)
        own = list(documents(kind, folder, seen, counts))
        size = sum(len(x.text.encode()) for x in own)
        origin[name] = {"version": version, "files": len(own), "bytes": size}
        origin[name]["licences"] = licences(folder)
        found += own
    order = np.random.default_rng(0).permutation(len(found))
    repeated = counts["repeated"] / max(1, counts["bytes"])
    return [found[i] for i in order], {"packages": origin, "repeated": round(repeated, 4)}


def tokenizer_of(texts: list[str]) -> Any:
    """A byte-level BPE whose symbol 0 ends a document."""
    import tokenizers  # pyright: ignore[reportMissingImports]
    from tokenizers import decoders, models, pre_tokenizers, trainers  # pyright: ignore

    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    found.train_from_iterator(texts[::SAMPLE], trainer)
    return found


def encoded(tokenizer: Any, texts: list[str], most: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Tokens of documents, each with an end, until there are enough; and how many there are."""
    parts: list[np.ndarray] = []
    tokens = size = 0
    for i in range(0, len(texts), BATCH):
        if tokens >= most:
            break
        size += sum(len(text.encode()) for text in texts[i : i + BATCH])
        codes = tokenizer.encode_batch(texts[i : i + BATCH])
        parts += [np.array([*code.ids, 0], np.uint16) for code in codes]
        tokens = sum(map(len, parts))
    counts = {"tokens": tokens, "bytes": size, "bytes_per_token": round(size / tokens, 3)}
    return np.concatenate(parts), counts


def main() -> None:
    """Makes the file and prints its statistics."""
    parser = _record.parser_of(__doc__)
    add = parser.add_argument
    add("--packages", type=Path, default=Path("runs", "packages"), help="(%(default)s)")
    add("--to", type=Path, default=PLACE, help="(%(default)s)")
    args = parser.parse_args()
    found = {kind: gathered(kind, args.packages) for kind in MOST}
    tokenizer = tokenizer_of([x.text for own, _ in found.values() for x in own])
    arrays: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for kind, (own, origin) in found.items():
        about[kind] = origin
        for part in ("train", "held_out"):
            texts = [x.text for x in own if x.held_out == (part == "held_out")]
            arrays[f"{kind}_{part}"], origin[part] = encoded(tokenizer, texts, MOST[kind])
    whole = b"".join(x.tobytes() for x in arrays.values())
    about["digest"] = hashlib.sha256(whole).hexdigest()[:16]
    args.to.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.to, about=json.dumps(about), **arrays)
    tokenizer.save(str(args.to.with_name(f"{args.to.stem}-bpe.json")))
    print(json.dumps(about, indent=1))
    print(f"{args.to}: {args.to.stat().st_size / 2**20:.1f} MiB")
