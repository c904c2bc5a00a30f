#!/usr/bin/env python3
"""Makes austen.txt.xz, the text behind data.source = "austen", out of the Debian package r-cran-janeaustenr.

    apt-get download r-cran-janeaustenr
    python3 make.py r-cran-janeaustenr_1.0.0-1_all.deb austen.txt.xz

The package holds the six novels as an R database: an index (Rdata.rdx) says where in Rdata.rdb each novel lies, and a
novel is a serialised vector of lines. The result is the novels in the order in which they appeared, a chapter after
the other, with a form feed (which the text does not hold) between two chapters.
"""

import gzip
import lzma
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

NOVELS = ["sensesensibility", "prideprejudice", "mansfieldpark", "emma", "northangerabbey", "persuasion"]
HEADING = re.compile(r"(?:VOLUME|CHAPTER|Chapter) (?:[IVXLC]+|[0-9]+)")
SEPARATOR = "\f"

# Types and flags of R's serialisation, as "R Internals" names them.
SYMSXP, LISTSXP, CHARSXP, LGLSXP, INTSXP, STRSXP, VECSXP, NIL, REFSXP = 1, 2, 9, 10, 13, 16, 19, 254, 255
HAS_ATTRIBUTES, HAS_TAG = 0x200, 0x400


class Reader:
    """R's XDR serialisation, as far as this package uses it."""

    def __init__(self, data):
        assert data[:2] == b"X\n", "not R's binary serialisation"
        self.data, self.at, self.references = data, 2, []
        version, _, _ = self.integer(), self.integer(), self.integer()
        assert version in (2, 3), f"version {version} of the serialisation is not known"
        if version == 3:
            self.take(self.integer())

    def take(self, count):
        self.at += count
        return self.data[self.at - count : self.at]

    def integer(self):
        return struct.unpack(">i", self.take(4))[0]

    def item(self):
        flags = self.integer()
        kind = flags & 0xFF
        if kind == NIL:
            return None
        if kind == REFSXP:
            return self.references[(flags >> 8) - 1]
        if kind == SYMSXP:
            self.references.append(self.item())
            return self.references[-1]
        if kind == CHARSXP:
            length = self.integer()
            return None if length < 0 else self.take(length).decode("utf-8")
        if kind == LISTSXP:
            if flags & HAS_ATTRIBUTES:
                self.item()
            tag = self.item() if flags & HAS_TAG else None
            value = self.item()
            return [(tag, value), *(self.item() or [])]
        length = self.integer()
        if kind in (LGLSXP, INTSXP):
            value = [self.integer() for _ in range(length)]
        elif kind in (STRSXP, VECSXP):
            value = [self.item() for _ in range(length)]
        else:
            raise ValueError(f"type {kind} of the serialisation is not known")
        names = dict(self.item() or []).get("names") if flags & HAS_ATTRIBUTES else None
        return dict(zip(names, value)) if names else value


def novels(folder):
    """The lines of each novel, by the package's name for it."""
    index = Reader(gzip.decompress((folder / "Rdata.rdx").read_bytes())).item()["variables"]
    database = (folder / "Rdata.rdb").read_bytes()
    found = {}
    for name, (offset, length) in index.items():
        packed = database[offset : offset + length]
        data = zlib.decompress(packed[4:])
        assert len(data) == struct.unpack(">I", packed[:4])[0], f"{name} is cut short"
        found[name] = Reader(data).item()
    return found


def chapters(lines):
    """The chapters of a novel. Its title page and the heading of a volume belong to the chapter that follows."""
    starts, begun, after_heading = [0], False, False
    for at, line in enumerate(lines):
        if not line.strip():
            continue
        heading = HEADING.fullmatch(line.strip()) is not None
        if heading and begun and not after_heading:
            starts.append(at)
        begun, after_heading = begun or heading, heading
    parts = [lines[start:end] for start, end in zip(starts, [*starts[1:], len(lines)])]
    return ["\n".join(part).strip("\n") + "\n" for part in parts]


def main(package, out):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
        found = novels(Path(folder, "usr/lib/R/site-library/janeaustenr/data"))
    documents = [chapter for name in NOVELS for chapter in chapters(found[name])]
    text = SEPARATOR.join(documents)
    assert text.count(SEPARATOR) == len(documents) - 1
    # A reader takes a dictionary's memory: no more than the text is long.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 4 << 20}]
    Path(out).write_bytes(lzma.compress(text.encode(), check=lzma.CHECK_CRC64, filters=filters))
    print(f"{len(documents)} documents, {len(text.encode())} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
