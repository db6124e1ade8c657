"""Detect rows at the end of a table that sum up the rows above: totals, averages and counts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from protonet._text import plural, to_printable
from protonet.tables.columns.parsing import format_cells, is_missing, parse_numeric_column, replace_missing_cells
from protonet.tables.columns.quantities import infer_numeric_format
from protonet.tables.formats.source import TableChunk

#: Words for totals, averages and other statistics, in the languages of offices; numbers that add up need no word.
_SUMMARY_WORDS = re.compile(
    r"(?:grand |sub.?)?tot[ae]a?ls?|total (?:g.n.ral|general|geral)|totale? \w+|sums?|somme|summe|soma|suma|som|summa|"
    r"(?:ins)?gesamt(?:summe)?|ensemble|razem|ogółem|łącznie|celkem|összesen|yhteensä|i alt|totalt|toplam|"
    r"σύνολο|итого|всего|сумма|разом|усього|[合总總小][計计](?:额|數|数)?|합계|총계|소계|المجموع|סה\"כ|รวม|"
    r"averages?|avg|means?|medians?|mittelwert|mittel|durchschnitt|moyenne|m[ée]dia[n]?[ea]?|promedio|gemiddelde|"
    r"średnia|průměr|átlag|keskiarvo|medelvärde|gjennomsnitt|gennemsnit|ortalama|μέσος|средн\w+|среднее|平均\w*|평균|"
    r"st(?:andard|d)?\.? ?dev(?:iation)?|standardabweichung|min(?:imum)?|max(?:imum)?|count|anzahl|nombre",
    re.IGNORECASE,
)


def handle_summary_rows(
    chunks: Iterable[TableChunk], notes: list[str], position_format: str, missing: Collection[str], *, are_dropped: bool
) -> Iterator[TableChunk]:
    """Yield the chunks of a table; rows at its end that sum up the last chunk are left out, or reported only.

    Args:
        chunks: The rows of the table, with all columns.
        notes: A note about such rows is added to this list.
        position_format: The format string of the positions of rows in the note.
        missing: The texts that mean a missing cell.
        are_dropped: Whether these rows are left out. Otherwise they are yielded, as rows to be predicted are.
    """
    last = None
    for chunk in chunks:
        if last is not None:
            yield last
        last = chunk
    if last is None:
        return
    n_rows = len(last.positions)
    n_summaries = count_summary_rows([replace_missing_cells(cells, missing) for cells in last.columns])
    if n_summaries:
        start = n_rows - n_summaries
        cells = [str(format_cells(column[start : start + 1])[0]) for column in last.columns]
        shown = to_printable(", ".join(filter(None, cells))[:50])
        first = f"{position_format.format(last.positions[start])} ({shown})"
        rows = f"{plural(n_summaries, 'row')} at the end sum{'s' * (n_summaries == 1)} up the rows above, {first}"
        if are_dropped:
            notes.append(f"{rows}: left out; put a real row elsewhere")
            last = TableChunk([column[:start] for column in last.columns], last.positions[:start])
        else:
            notes.append(f"warning: {rows}: the prediction has no meaning; remove it from the table")
    yield last


def count_summary_rows(columns: Sequence[np.ndarray]) -> int:
    """Count the rows at the end of a table that sum up the rows above, given its columns (n,) without missing words.

    Such a row differs from the others by an empty cell in a column without gaps, or by a new word, and its numbers are
    the sums, means or counts of their columns; or it has both an empty cell and a word for it. Sums of several columns
    need no other difference. A word alone is not enough: classes are called "moyenne", "max" and "count".
    """
    max_rows, min_body_rows = 4, 3
    if not columns:
        return 0
    n_rows, is_blank = len(columns[0]), np.logical_and.reduce([is_missing(cells) for cells in columns])
    filled = np.flatnonzero(~is_blank)
    columns = [cells[filled] for cells in columns]  # a blank row may stand above the sums
    for n_summaries in range(min(max_rows, len(filled) - min_body_rows), 0, -1):
        body = len(filled) - n_summaries
        if all(_is_summary_row(columns, body, row) for row in range(body, len(filled))):
            return n_rows - int(filled[body])
    return 0


def _is_summary_row(columns: Sequence[np.ndarray], n_body: int, row: int) -> bool:
    """Test whether a row sums up the first ``n_body`` rows."""
    n_blank = n_new = n_beyond = 0
    has_word, numeric = False, list[tuple[str, np.ndarray, np.ndarray]]()
    for cells in columns:
        text, above = str(format_cells(cells[row : row + 1])[0]), cells[:n_body]
        is_word = _SUMMARY_WORDS.fullmatch(text.strip(" .:")) is not None
        if not text:
            n_blank += not is_missing(above).any()
        elif is_word or not any(map(str.isdigit, text)):
            levels = set(above.tolist())
            n_new += text not in levels and 2 * len(levels) <= n_body
            has_word = has_word or (is_word and text not in levels)
        else:
            numeric.append((text, above, cells[row : row + 1]))
    if not (n_blank or n_new or has_word) and len(numeric) < max(2, len(columns)):
        return False  # most tables, before their columns are parsed
    agreeing, n_numbers = {"sum", "mean", "count"}, 0
    for text, above, cell in numeric:
        values = _parse_numbers(above, cell)
        if len(values) < 2:  # a date, or a number among words
            continue
        n_numbers += 1
        *others, value = values.tolist()
        n_beyond += not min(others) <= value <= max(others)
        statistics = _list_statistics(text, values[:-1])
        agreeing -= {name for name, expected, tolerance in statistics if abs(value - expected) > tolerance}
        if not agreeing and not has_word:
            return False
    is_other = n_blank + n_new > 0
    if not n_numbers or not agreeing:
        return has_word and n_blank > 0
    if "sum" in agreeing and (n_beyond > 1 or (is_other and n_beyond)):
        return True
    # A mean without decimals may be a number as others.
    has_decimals = any(re.search(r"[.,]\d", text) for text, *_ in numeric)
    return (has_word and n_blank > 0) or ((is_other or has_word) and n_numbers > 1 and has_decimals)


def _parse_numbers(above: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """Parse the numbers (n,) of a column, and append that of the last ``cell`` (1,); () if it is not a number."""
    values = np.concatenate([above, cell])
    if values.dtype.kind == "O":
        values = values[values != ""]
        numeric_format = infer_numeric_format(dict.fromkeys(values[:-1].tolist())) if len(values) > 1 else ""
        values = parse_numeric_column(values, numeric_format) if numeric_format else values[:0]
    values = values.astype(np.float64)
    return values[np.isfinite(values)] if np.isfinite(values[-1:]).all() else values[:0]


def _list_statistics(text: str, values: np.ndarray) -> list[tuple[str, float, float]]:
    """List the statistics of numbers (n,): name, value and tolerance, given the text of a cell that may show one."""
    decimals = re.search(r"[.,](\d+)\D*$", text)
    half_digit = 0.5 * 10.0 ** -len(decimals[1] if decimals else "")
    # Workbooks add numbers with more digits than a text file shows; whole numbers have none.
    hidden = 0.0 if np.array_equal(values, np.rint(values)) else half_digit * len(values)
    total, mean, relative = float(values.sum()), float(values.mean()), 1e-9
    return [
        ("sum", total, half_digit + hidden + relative * abs(total)),
        ("mean", mean, half_digit + relative * abs(mean)),
        ("count", float(len(values)), 0.0),
    ]
