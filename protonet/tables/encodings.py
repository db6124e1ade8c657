"""Open files of text, also compressed ones or the standard input, and detect their encoding."""

from __future__ import annotations

import codecs
import gzip
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from io import BufferedReader
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, NoReturn, cast
from zipfile import ZipFile

from protonet._text import CONTROL_CHARS, shorten_list
from protonet.errors import optional_packages, raise_input_error

BYTES_PER_DECODING = 2**22  #: Number of bytes that `detect_encoding` decodes at a time.
#: Encodings by their byte order mark; that of UTF-32 begins with that of UTF-16.
BYTE_ORDER_MARKS = {
    **{codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32-le", codecs.BOM_UTF32_BE: "utf-32-be"},
    **{codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"},
}
ZIP_MAGIC = b"PK\3\4"  #: The first bytes of a ZIP archive, also of an Excel workbook.
#: Matches characters that do not occur in text of any encoding.
_BINARY_CHARS_PATTERN = re.compile("[\0-\x08\x0e-\x1f]")
#: Matches signs within words, and letters of other alphabets beside Latin ones; Chinese letters may stand there.
_MIXED_ALPHABETS = re.compile("(?<=[A-Za-z])(?:[\u0250-\u1fff]|[¡-¿](?=[A-Za-z]))|[\u0250-\u1fff](?=[A-Za-z])")
_UNDECODED_BYTES_PATTERN = re.compile("[\udc80-\udcff]")


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file or the standard input as a seekable stream of decompressed bytes.

    Gzip files are decompressed, and so is the only file of a ZIP archive without other ones.
    """
    with ExitStack() as stack:
        is_stdin = path == Path("-")
        file: BinaryIO = sys.stdin.buffer if is_stdin else stack.enter_context(path.open("rb"))
        if is_stdin or not file.seekable():
            copy = cast(BinaryIO, stack.enter_context(TemporaryFile()))
            shutil.copyfileobj(file, copy)
            file = copy
        file.seek(0)
        magic = file.read(4)
        file.seek(0)
        if magic[:2] == b"\x1f\x8b":
            file = cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file)))
        elif path.suffix.lower() == ".zip":
            archive = stack.enter_context(ZipFile(file))
            file = cast(BinaryIO, stack.enter_context(archive.open(find_zip_member(path, archive))))
        yield file


def check_encoding(encoding: str | None) -> None:
    """Raise an InputError unless ``encoding`` is None or names an encoding of text."""
    try:
        " ".encode("utf-8" if encoding is None else encoding)  # codecs that are not of text are not found
    except (LookupError, UnicodeError):
        remedy = "For example utf-8, cp1251, shift_jis or gb18030."
        raise_input_error("encoding", "name an encoding", repr(encoding), remedy)


def find_zip_member(path: Path, archive: ZipFile) -> str:
    """Return the name of the only file in a ZIP archive; raise an InputError if it has another number of files."""
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
    if len(names) != 1:
        got, remedy = f"{len(names)} in {path}: {shorten_list(names)}", f"Unpack it: python -m zipfile -e {path} FOLDER"
        raise_input_error("path", "hold one file, if it is a ZIP archive", got, remedy)
    return names[0]


def peek_standard_input(n_bytes: int) -> bytes:
    """Return the first bytes of the standard input, without reading them from it."""
    file = sys.stdin.buffer
    if not file.seekable():
        return cast(BufferedReader, file).peek(n_bytes)[:n_bytes]
    start = file.tell()
    magic = file.read(n_bytes)
    file.seek(start)
    return magic


def detect_encoding(
    path: Path, file: BinaryIO, encoding: str | None = None, usual: str | None = None
) -> tuple[int, str, bool, bool]:
    """Detect the encoding of a file of text, unless it is given: a byte order mark, UTF-8, or one of other countries.

    If the text is in none of these, and is readable in the ``usual`` encoding, that is preferred to others.

    Returns:
        The size of the byte order mark, the encoding, whether it was guessed, and whether the text has control
        characters.

    Raises:
        InputError: The file is not text, or not text of the given encoding.
        MissingPackageError: The text is not Unicode, and the package that guesses its encoding is missing.
    """
    file.seek(0)
    head = file.read(1000)
    mark = next((mark for mark in BYTE_ORDER_MARKS if head.startswith(mark)), b"")
    if mark and (encoding is None or encoding.lower().startswith("utf")):
        encoding = BYTE_ORDER_MARKS[mark]
    else:
        mark = b""
    check_encoding(encoding)
    zeros = head[::2].count(0), head[1::2].count(0)
    is_guessed = encoding is None and min(zeros) == 0 and max(zeros) > len(head) / 5  # every digit of UTF-16 has one
    if is_guessed:
        encoding = "utf-16-le" if zeros[1] else "utf-16-be"
    if encoding is not None:
        line, _, _, has_control_chars = _decode(file, len(mark), encoding)
        if line:
            _raise_invalid_text(path, f"no {encoding.upper()} in line {line}")
        return len(mark), encoding, is_guessed, has_control_chars
    line, binary_line, is_mostly_valid, has_control_chars = _decode(file, 0, "utf-8", "surrogateescape")
    if line and is_mostly_valid:
        _raise_invalid_text(path, f"no UTF-8 in line {line}")
    if line and binary_line:
        _raise_invalid_text(path, f"no text in line {binary_line}")
    if not line:
        return 0, "utf-8", False, has_control_chars
    decoded = ((name, *_decode(file, 0, name)) for name in _guess_encodings(file, usual))
    guess = next(((name, has_control_chars) for name, invalid, _, _, has_control_chars in decoded if not invalid), None)
    if guess is None:
        _raise_invalid_text(path, f"neither UTF-8 nor another known encoding in line {line}")
    return 0, guess[0], True, guess[1]


def _raise_invalid_text(path: Path, reason: str) -> NoReturn:
    """Raise an InputError for text that cannot be decoded."""
    remedy = "Save it as UTF-8, or pass `encoding`."
    raise_input_error("path", "be a CSV file that can be read", f"{path} ({reason})", remedy)


def _decode(file: BinaryIO, start: int, encoding: str, errors: str = "strict") -> tuple[int, int, bool, bool]:
    """Decode a file from a position on.

    Returns the first line that is not valid, 0 for none; the first invalid line with binary data, 0 for none; whether
    more bytes continue valid characters of UTF-8 than are invalid; and whether the text has control characters.
    """
    file.seek(start)
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    line, has_control_chars, balance = 1, False, 0
    first_invalid = first_binary = 0
    for chunk in chain(iter(partial(file.read, BYTES_PER_DECODING), b""), [b""]):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            before = error.object[: error.start].decode(encoding, "ignore").count("\n")
            return line + before, 0, False, has_control_chars
        if not text.isascii() and errors != "strict":
            balance += len(text.encode("utf-8", "ignore")) - len(text)
            if undecoded := _UNDECODED_BYTES_PATTERN.search(text):
                first_invalid = first_invalid or line + text.count("\n", 0, undecoded.start())
                if not first_binary and (binary := _BINARY_CHARS_PATTERN.search(text)):
                    first_binary = line + text.count("\n", 0, binary.start())
        has_control_chars = has_control_chars or CONTROL_CHARS.search(text) is not None
        line += text.count("\n")
    return first_invalid, first_binary, balance >= 0, has_control_chars


def _guess_encodings(file: BinaryIO, usual: str | None = None) -> list[str]:
    """Guess the encoding of text that is not Unicode, by the first lines that are not ASCII; the likeliest first."""
    with optional_packages("files"):
        from charset_normalizer import from_bytes  # noqa: PLC0415 - optional

    # Those that offices use; with fewer candidates, short texts are recognized more often.
    asian = ["shift_jis", "gb18030", "euc_kr", "big5", "euc_jp"]
    others = ["cp1251", "koi8_r", "cp866", "cp1253", "cp1255", "cp1256", "cp874", "cp1252", "cp1250", "mac_roman"]
    # The sets of Windows, which include the older ones, such as ① beside the signs of Shift-JIS.
    supersets = {"shift_jis": "cp932", "euc_kr": "cp949", "big5": "cp950"}
    max_bytes = 2**17  # of lines; the package compares all candidates, each in parts of this text
    file.seek(0)
    lines, n_bytes = list[bytes](), 0
    for line in file:
        if not line.isascii():
            lines.append(line)
            n_bytes += len(line)
            if n_bytes > max_bytes:
                break
    sample = b"".join(lines)
    min_distinct_bytes = 4  # two words of two letters; fewer are mostly accents, or the sign of a currency
    if len({*sample} - {*range(128)}) < min_distinct_bytes:
        return [*[name for name in (*asian, *others, *supersets.values()) if name == usual], "cp1252", "cp1251"]
    words = b" ".join(sorted({word for word in re.split(rb'[,\t;|\r\n"]+', sample) if not word.isascii()}))
    # Whole lines say more about long texts, different words about cells. A low threshold keeps fewer candidates.
    costs = defaultdict[str, list[float]](list)
    for text in (sample, words):
        matches = from_bytes(text, cp_isolation=[*asian, *others], threshold=0.2, language_threshold=0.05)
        for rank, match in enumerate(matches):
            alphabets = set(match.alphabets)
            # Any byte of other encodings is a half-width sign of Shift-JIS; real text has other signs beside them.
            is_real = alphabets & {"CJK Unified Ideographs", "Hiragana", "Katakana"}
            if "Halfwidth and Fullwidth Forms" not in alphabets or is_real:
                decoded = str(match)
                letters = [letter for letter in decoded if letter.isalpha() and not letter.isascii()]
                capitals = sum(map(str.isupper, letters))  # in KOI8, of the small letters of others
                mixed = len(_MIXED_ALPHABETS.findall(decoded))
                strange = (0.05 * capitals + 0.2 * mixed) / max(1, len(letters))
                for name in match.could_be_from_charset:  # those that decode this text alike
                    costs[name].append(match.chaos - 0.1 * match.coherence + strange + 0.001 * rank)
    missing_cost, western_lead, usual_lead = 0.25, 0.03, 0.15
    total = {name: sum(values) + missing_cost * (2 - len(values)) for name, values in costs.items()}
    best = min(total, key=lambda name: total[name], default="cp1252")
    # Letters of Western Europe are also some of Eastern Europe's and of old Macs: Western text is more frequent.
    if not total or (best in {"cp1250", "mac_roman"} and total.get("cp1252", 1.0) <= total[best] + western_lead):
        total["cp1252"] = total.get(best, 0.0) - 1
    ordered = sorted(total, key=lambda name: total[name] - usual_lead * (usual in {name, supersets.get(name, name)}))
    return [better for name in ordered for better in (supersets.get(name, name), name)]
