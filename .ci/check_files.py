"""Two checks of files for pre-commit: text ends in one newline (mended where it does not), and no file is large."""

from __future__ import annotations

import sys
from pathlib import Path

#: Bytes, the most that a committed file may have.
LARGEST = 2_000_000


def end_in_one_newline(text: bytes) -> bytes:
    """Replace the end of a text by one newline; a text of white space becomes empty."""
    return text.rstrip(b"\r\n") + b"\n" if text.strip() else b""


def mend_ending(path: Path) -> bool:
    """Return whether a file's end had to be mended."""
    text = path.read_bytes()
    mended = end_in_one_newline(text)
    if text == mended:
        return False
    path.write_bytes(mended)
    return True


def main(arguments: list[str]) -> int:
    """Check the files that are named; return 1 if one was mended or is too large."""
    check, *names = arguments
    if check == "--newline":
        wrong = [name for name in names if mend_ending(Path(name))]
        text = "ended in no newline or in several, mended"
    else:
        wrong = [name for name in names if Path(name).stat().st_size > LARGEST]
        text = f"has more than {LARGEST:,} bytes"
    for name in wrong:
        print(f"{name}: {text}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
