"""Files that hold no text, known by their first bytes, or by their names where such files have no first bytes of
their own."""

from __future__ import annotations

import gzip
import re

from disttrain.corpora.documents import reading
from disttrain.corpora.sources import Format, Source
from disttrain_trainer.data.corpora.manifest import CorpusError

_HEAD_BYTES = 512
_UNPACK = "decompress it, or compress it with gzip as NAME.gz"
_EXTRACT = "extract its files and name their folder"
_TABLE = "write its table as NAME.parquet"
_NUMBERS = "it holds numbers and no text: name the text that they were made of"
_TOKENS = "it holds tokens already: Megatron-LM's .bin and .idx are trained on as they are, with `path`"

_BEGINNINGS = (
    (rb"\x1f\x8b", "gzip", "call it NAME.gz"),
    (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "Zstandard", _UNPACK),
    (rb"BZh[1-9](\x31\x41\x59\x26\x53\x59|\x17\x72\x45\x38\x50\x90)", "bzip2", _UNPACK),
    (rb"\xfd7zXZ\x00", "xz", _UNPACK),
    (rb"\x04\x22\x4d\x18", "LZ4", _UNPACK),
    (rb"7z\xbc\xaf\x27\x1c", "7-Zip", _EXTRACT),
    (rb"Rar!\x1a\x07", "RAR", _EXTRACT),
    (rb"PK(\x03\x04|\x05\x06)", "zip", _EXTRACT),
    (rb".{257}ustar", "tar", _EXTRACT),
    (rb"PAR1", "Parquet", "call it NAME.parquet"),
    (rb"ARROW1\x00\x00|\xff\xff\xff\xff.{3}\x00\x10\x00\x00\x00", "Arrow", _TABLE),
    (rb"Obj\x01", "Avro", _TABLE),
    (rb"SQLite format 3\x00", "SQLite", _TABLE),
    (rb"\x89HDF\r\n\x1a\n", "HDF5", _NUMBERS),
    (rb"\x93NUMPY", "NumPy", _NUMBERS),
    (rb"MMIDIDX\x00\x00|TNTIDX\x00\x00", "Megatron-LM's index", _TOKENS),
    (rb"%PDF-\d", "PDF", "extract its text"),
)
_KINDS = [(re.compile(beginning, re.DOTALL), kind, advice) for beginning, kind, advice in _BEGINNINGS]
_NAMES = {
    ".bin": _NUMBERS,
    ".idx": _TOKENS,
    ".br": _UNPACK,
    ".lzma": _UNPACK,
}


def require_text(source: Source) -> None:
    """Raises CorpusError where a file that would be read as text, packed or not, is of a kind that is none."""
    if source.format is Format.TABLE:
        return
    with reading(source), gzip.open(source.path) if source.packed else source.path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    name = source.path.name.lower()
    found = next(((f"is of the kind {kind}", advice) for known, kind, advice in _KINDS if known.match(head)), None)
    found = found or next(
        ((f"is no text by its name ({end})", advice) for end, advice in _NAMES.items() if name.endswith(end)), None
    )
    if found is not None:
        inside = " inside of gzip" if source.packed else ""
        raise CorpusError(f"{source.path} {found[0]}{inside}; {found[1]}, or leave it out with --pattern")
