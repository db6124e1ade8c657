"""Open a table file of any format, or a folder of pictures, to read it chunk by chunk."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NoReturn
from zipfile import BadZipFile, ZipFile

from protonet._text import normalize_spelling, shorten_list
from protonet.embeddings.pictures.reading import detect_broken_pictures, is_picture_path, list_pictures, path_to_text
from protonet.errors import raise_input_error
from protonet.tables import delimited
from protonet.tables.encodings import ZIP_MAGIC, find_zip_member, peek_standard_input
from protonet.tables.formats.arrays import open_array_table
from protonet.tables.formats.arrow import open_arrow
from protonet.tables.formats.excel import open_workbook
from protonet.tables.formats.records import open_arff, open_json, open_sqlite
from protonet.tables.formats.source import (
    TableChunk,
    TableSource,
    convert_command,
    make_column_reader,
    make_text_array,
    rows_per_chunk,
)

TEXT_SUFFIXES = (".csv", ".tsv", ".txt", ".data", ".dat")
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
DATABASE_SUFFIXES = (".sqlite", ".sqlite3", ".db")
WORKBOOK_SUFFIXES = (".xlsx", ".xlsm", ".xls", ".xlsb", ".ods")
#: Suffixes of files that may be compressed; a second suffix .gz or .zip says so.
COMPRESSIBLE_SUFFIXES = (*TEXT_SUFFIXES, *JSON_SUFFIXES, ".arff")
TABLE_SUFFIXES = (
    *(suffix + packed for packed in ("", ".gz", ".zip") for suffix in COMPRESSIBLE_SUFFIXES),
    *(*WORKBOOK_SUFFIXES, *DATABASE_SUFFIXES, ".parquet", ".feather", ".npz", ".npy", ".zip"),
)
#: Name of the column of paths in tables of pictures.
PICTURE_COLUMN = "picture"


def open_table_source(
    path: Path,
    labels: Path | None = None,
    *,
    label: str = "label",
    require_labels: bool = False,
    skip_broken: bool = False,
    names: Collection[str] = (),
    sheet: str | None = None,
    text_column: str = "text",
    has_header: bool = True,
    encoding: str | None = None,
    usual_encoding: str | None = None,
) -> TableSource:
    """Open a table file in the format that its suffix names, and read its header.

    Args:
        path: The file; "-" is delimited text or an Excel workbook from the standard input. A picture, or a folder of
            pictures, is opened as a table of paths.
        labels: The NPY file of labels, if ``path`` is an NPY file of rows.
        label: The name of the label column of a table of pictures with one folder per class.
        require_labels: Whether labels are required in arrays and folders of pictures.
        skip_broken: Whether pictures that cannot be decoded are skipped.
        names: Names of expected columns, which help to detect header and separator.
        sheet: The name of the sheet of a workbook, or of the table of a database; None for the first sheet, or for the
            only table.
        text_column: The name of the only column of a list of texts: a .txt file with one text per line and no header.
        has_header: Whether the first row of delimited text names the columns; see `read_delimited_rows`.
        encoding: The encoding of a file of text; None to detect it.
        usual_encoding: The encoding of an earlier file, which is preferred if delimited text is not Unicode.

    Raises:
        InputError: There is no such file, its suffix is not supported, or it cannot be read.
    """
    is_stdin = path == Path("-")
    suffix = _find_suffix(path)
    if is_stdin and peek_standard_input(len(ZIP_MAGIC)) == ZIP_MAGIC:
        suffix = ".xlsx"
    is_delimited, is_text = suffix in TEXT_SUFFIXES, suffix in COMPRESSIBLE_SUFFIXES
    if sheet is not None and suffix not in (*WORKBOOK_SUFFIXES, *DATABASE_SUFFIXES):
        raise_input_error("sheet", "come with a workbook or a database", path, "Leave it out.")
    if not has_header and not is_delimited:
        raise_input_error("no_header", "come with delimited text, such as CSV", path, "Leave it out.")
    if encoding is not None and not is_text:
        raise_input_error("encoding", "come with a file of text, such as CSV", path, "Leave it out.")
    if not is_stdin and is_picture_path(path):
        return open_picture_table(path, label, require_labels=require_labels, skip_broken=skip_broken)
    if not path.suffix and not is_stdin and not path.exists():
        raise_input_error("path", "be a table or a folder that exists", path, "Pass another path.")
    if suffix in {".npz", ".npy"}:
        return open_array_table(path, labels, require_labels=require_labels)
    if suffix in {".parquet", ".feather"}:
        return open_arrow(path, suffix[1:].title())
    if suffix in WORKBOOK_SUFFIXES:
        return open_workbook(path, suffix, names, sheet)
    if suffix in DATABASE_SUFFIXES:
        return open_sqlite(path, sheet)
    if suffix in JSON_SUFFIXES:
        return open_json(path, encoding)
    if suffix == ".arff":
        return open_arff(path, encoding)
    if not is_delimited:
        raise_unknown_suffix(path, suffix)
    text_column_name = text_column if has_header and suffix == ".txt" else None
    encodings = {"encoding": encoding, "usual_encoding": usual_encoding}
    return open_csv(path, names, text_column_name, has_header=has_header, **encodings)


def _find_suffix(path: Path) -> str:
    """Find the suffix that names the format of a table, in lower case; of a compressed one, that of its content."""
    if path == Path("-"):
        return ".csv"
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".zip"] and path.is_file():
        try:
            with ZipFile(path) as archive:
                suffix = Path(find_zip_member(path, archive)).suffix.lower()
        except (BadZipFile, OSError) as error:
            got = f"{path} ({type(error).__name__})"
            raise_input_error("path", "be a ZIP archive that can be read", got, "Pass another file.")
        if suffix not in COMPRESSIBLE_SUFFIXES:
            got, remedy = f"a {suffix} file in {path}", f"Unpack it: python -m zipfile -e {path} FOLDER"
            raise_input_error("path", "hold a file of text, if it is a ZIP archive", got, remedy)
        return suffix
    if suffixes[-1:] in ([".gz"], [".zip"]) and suffixes[-2:-1] and suffixes[-2] in COMPRESSIBLE_SUFFIXES:
        return suffixes[-2]
    return suffixes[-1] if suffixes else ""


def raise_unknown_suffix(path: Path, suffix: str) -> NoReturn:
    """Raise an InputError about a file of another format; it names the command that converts it, if there is one."""
    readers = {
        **{".dta": "read_stata", ".sav": "read_spss", ".sas7bdat": "read_sas", ".xpt": "read_sas", ".orc": "read_orc"},
        **{".xml": "read_xml", ".h5": "read_hdf", ".hdf5": "read_hdf"},
    }
    remedy = "Save the table as one of these."
    if suffix in readers:
        remedy = f"Convert it: {convert_command(path, readers[suffix])}"
    elif suffix == ".rds":
        csv = str(path.with_suffix(".csv"))
        remedy = f'Convert it: Rscript -e \'write.csv(readRDS("{path}"), "{csv}", row.names = FALSE)\''
    others = [known for known in TABLE_SUFFIXES if known.count(".") == 1 and known not in COMPRESSIBLE_SUFFIXES]
    must = f"end in {', '.join(COMPRESSIBLE_SUFFIXES)} (also with .gz or .zip), {', '.join(others)}"
    raise_input_error("path", must, path, remedy)


def open_picture_table(path: Path, label: str, *, require_labels: bool, skip_broken: bool) -> TableSource:
    """Open a picture or a folder of pictures as a table of paths, with the column ``label`` for class folders."""
    pictures_per_chunk = 256
    paths, classes, notes = list_pictures(path, require_labels=require_labels)
    if skip_broken:
        broken = detect_broken_pictures(paths)
        skipped = [path_to_text(picture) for picture, is_broken in zip(paths, broken, strict=True) if is_broken]
        readable = [index for index, is_broken in enumerate(broken) if not is_broken]
        if skipped:
            notes.append(f"{len(skipped)} of {len(paths)} pictures cannot be read: {shorten_list(skipped)}")
        if not readable:
            got = f"none of {len(paths)} in {path}"
            raise_input_error("path", "hold pictures that can be read", got, "Check the files.")
        if classes is not None:
            empty = set(classes) - {classes[index] for index in readable} if require_labels else set()
            if empty:
                remedy = "Add one, or remove the folder."
                got = f"broken ones alone in {path / min(empty)}"
                raise_input_error("path", "have a picture in every class folder", got, remedy)
            classes = [classes[index] for index in readable]
        paths = [paths[index] for index in readable]
    texts = [list(map(path_to_text, paths))] + ([] if classes is None else [classes])
    columns = [make_text_array(cells, len(paths)) for cells in texts]
    header = [PICTURE_COLUMN, label][: len(columns)]
    return TableSource(
        header=header,
        n_columns=len(header),
        position_format="picture {} (counted from 0)",
        read_chunks=make_column_reader(columns, range(len(paths)), pictures_per_chunk),
        notes=notes,
        n_rows=len(paths),
    )


def open_csv(
    path: Path,
    names: Collection[str] = (),
    text_column: str | None = None,
    *,
    has_header: bool = True,
    encoding: str | None = None,
    usual_encoding: str | None = None,
) -> TableSource:
    """Open a file of delimited text as a table; the arguments are those of `open_table_source`."""
    notes: list[str] = []
    lines = delimited.read_delimited_rows(
        path,
        notes,
        names=names,
        text_column=text_column,
        has_header=has_header,
        encoding=encoding,
        usual_encoding=usual_encoding,
    )
    header = list(map(normalize_spelling, next(lines, (0, []))[1]))
    if not header:
        raise_input_error("path", "have a header and rows", f"{path}, which is empty", "Pass another file.")

    def read_chunks(indices: Sequence[int]) -> Iterator[TableChunk]:
        step = rows_per_chunk(4 * len(header))  # text takes more memory than numbers
        while numbered := list(islice(lines, step)):
            positions, rows = zip(*numbered, strict=True)
            cells = list(zip(*rows, strict=True))
            yield TableChunk([make_text_array(map(str.strip, cells[index]), len(rows)) for index in indices], positions)

    start = delimited.ENCODING_NOTE.partition("{")[0]
    guesses = (note.removeprefix(start).partition(";")[0] for note in notes if note.startswith(start))
    semicolons = delimited.DELIMITER_NOTE.format(delimited.DELIMITERS[";"]) in notes
    return TableSource(
        header=header,
        n_columns=len(header),
        position_format="line {}",
        read_chunks=read_chunks,
        notes=notes,
        has_semicolons=semicolons,
        encoding=next(guesses, encoding),
    )
