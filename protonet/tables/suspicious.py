"""Detect columns that leak the labels, and columns that identify groups of rows, such as persons.

The values of a group column occur in several rows, which nearly always have the same class. This is also true of a
feature that determines the class, as the city determines the country; therefore other evidence is counted as well.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: Nouns that name groups of rows, in lower case without accents: English, German, French, Spanish, Portuguese, Italian,
#: Dutch, Polish, Russian; Chinese, Japanese, Korean.
_GROUP_NOUNS = (
    "subject|subj|person|participant|proband|patient|user|customer|client|student|pupil|donor|volunteer|"
    "respondent|session|recording|record|run|animal|mouse|rat|plot|batch|lot|device|sensor|speaker|singer|"
    "signer|writer|author|household|specimen|sample|slide|video|clip|scan|pid|sid|uid|ptid|case|"
    "versuchsperson|vp|patientin|teilnehmer|teilnehmerin|kunde|nutzer|benutzer|schuler|gerat|geraet|"
    "sprecher|haushalt|sitzung|aufnahme|parzelle|sujet|utilisateur|eleve|appareil|locuteur|menage|seance|"
    "enregistrement|parcelle|echantillon|sujeto|paciente|participante|usuario|cliente|alumno|sesion|lote|"
    "dispositivo|hablante|hogar|parcela|muestra|sujeito|sessao|aluno|soggetto|paziente|partecipante|"
    "utente|sessione|lotto|parlante|campione|proefpersoon|deelnemer|gebruiker|sessie|pacjent|uczestnik|"
    "uzytkownik|sesja|пациент|субъект|участник|пользователь|сессия|患者|受试者|被试|用户|病人|参与者|被験者|参加者|利用者|話者|환자|"
    "피험자"
)
_ID_WORDS = "id|ids|uid|uuid|guid|idx|ident|identifier|kennung"
_ID_SUFFIXES = f"{_ID_WORDS}|nr|no|num|nummer|numero|number|code|codigo|kode|key|name|index|编号|代码|番号|号|번호"
_GROUP_NAME_PATTERN = re.compile(f"(?:{_GROUP_NOUNS})(?:(?:e?n|s)?(?:{_ID_SUFFIXES}))?")
_ID_SUFFIX_PATTERN, _ID_PATTERN = re.compile(_ID_SUFFIXES), re.compile(_ID_WORDS)


#: Minimum points of evidence to advise the user to hold out its groups together.
GROUP_MIN_CERTAIN_EVIDENCE_POINTS = 3


class GroupColumnEvidence(NamedTuple):
    """The evidence that a column identifies groups of rows."""

    evidence_points: int  #: Points of evidence, at least 2.
    n_repeated_values: int  #: The number of values that several rows have.

    @property
    def is_certain(self) -> bool:
        """Whether the evidence is strong enough to advise the user to group by this column."""
        return self.evidence_points >= GROUP_MIN_CERTAIN_EVIDENCE_POINTS


def detect_group_column(
    name: str, values: np.ndarray, labels: np.ndarray, *, ordered: bool
) -> GroupColumnEvidence | None:
    """Detect whether a column identifies groups of rows, such as persons.

    The values must determine the class of nearly all rows. Further evidence gives points:

    - three points if the column is named like a group (subject, patient, session, in several languages), or one point
      if it is named "id";
    - two points if the values are written like codes (s01, P-17, 3f9a2c01), or one point if they are running numbers or
      numbers of many digits;
    - one point if the rows of each value are adjacent;
    - one point if the numbers of rows per value are more equal than by chance.

    Args:
        name: The name of the column.
        values: (n,) the values of the column, in file order.
        labels: (n,) the label of each row.
        ordered: Whether the values have an order, as numbers do. If the class seldom changes along this order, the
            column is a feature, unless it is named like a group or the rows of each value are adjacent.

    Returns:
        The evidence; None if the column identifies no groups.
    """
    # Minimum number of repeated values.
    min_repeated_values = 8
    # Minimum number of repeated values per class. An ordinary feature with fewer values may well determine the class.
    min_repeated_values_per_class = 3
    # Minimum fraction of rows that have a repeated value.
    min_repeated_row_fraction = 0.5
    # Maximum fraction of the rows with a repeated value whose class is not that of most rows with this value.
    max_minority_fraction = 0.13
    # Maximum probability of at least that many blocks of a single class if class and value were independent.
    max_p_value = 1e-3
    # The same maximum for a column that is named like a group.
    max_p_value_for_group_names = 0.05
    # Maximum variance of the numbers of rows per value, relative to their mean, to call these numbers equal. For rows
    # with random values, the ratio is about 1.
    max_group_size_dispersion = 0.25
    # Minimum points of evidence to ask the user whether a column identifies groups.
    min_evidence_points = 2
    sorted_values = np.sort(values)
    if not (sorted_values[1:] == sorted_values[:-1]).any():  # fast exit: no value repeats in most columns
        return None
    n, (classes, y) = len(labels), np.unique(labels, return_inverse=True)
    levels, level_of, counts = np.unique(values, return_inverse=True, return_counts=True)
    repeated = counts > 1
    n_rows = int(counts[repeated].sum())
    min_values = max(min_repeated_values, min_repeated_values_per_class * len(classes))
    if repeated.sum() < min_values or n_rows < min_repeated_row_fraction * n:
        return None
    pair_counts = np.bincount(level_of * len(classes) + y, minlength=len(levels) * len(classes))
    class_counts = pair_counts.reshape(len(levels), -1)[repeated]  # (repeated values, classes)
    if n_rows - class_counts.max(axis=1).sum() > max_minority_fraction * n_rows:
        return None
    name_points = score_group_name(name)
    is_group_name = name_points == GROUP_MIN_CERTAIN_EVIDENCE_POINTS
    max_chance = max_p_value_for_group_names if is_group_name else max_p_value
    if _log_p_value_bound(level_of, y) > np.log(max_chance):
        return None
    adjacent = 1 + int((level_of[1:] != level_of[:-1]).sum()) == len(levels)
    if ordered and not is_group_name and not adjacent and _classes_change_seldom(class_counts.argmax(axis=1)):
        return None
    equal_sizes = counts[repeated].var() <= max_group_size_dispersion * counts[repeated].mean()
    points = name_points + score_group_values(levels) + adjacent + int(equal_sizes)
    return GroupColumnEvidence(points, len(class_counts)) if points >= min_evidence_points else None


def score_group_name(name: str) -> int:
    """Compute the points of evidence that the name of a column gives for a group column.

    The last word counts, or the word before "id", "no" or similar. "patient", "Patient_ID", "id_paciente", "subjectNo"
    and "Probandennummer" name groups, "patient_age" does not.

    Returns:
        ``GROUP_MIN_CERTAIN_EVIDENCE_POINTS`` for the name of a group, 1 for another name with "id", 0 for
        other names.
    """
    words = _split_name(name)
    is_id = _has_id_word(words)
    while len(words) > 1 and _ID_SUFFIX_PATTERN.fullmatch(words[-1]):
        words.pop()
    if words and _GROUP_NAME_PATTERN.fullmatch(words[-1]):
        return GROUP_MIN_CERTAIN_EVIDENCE_POINTS
    return int(is_id)


def _split_name(name: str) -> list[str]:
    """Split the name of a column into words, in lower case without accents."""
    plain = "".join(char for char in unicodedata.normalize("NFKD", name) if not unicodedata.combining(char))
    plain = unicodedata.normalize("NFC", plain)  # NFKD splits Korean syllables
    return [word.lower() for word in re.findall(r"[^\W\d_]+", re.sub("(?<=[a-z])(?=[A-Z])", " ", plain))]


def _has_id_word(words: Sequence[str]) -> bool:
    """Test whether the first or the last word of a name is "id" or the like."""
    return any(_ID_PATTERN.fullmatch(word) for word in [*words[:1], *words[-1:]])


def score_group_values(levels: np.ndarray) -> int:
    """Score how much values (m,) look like identifiers: 2 for codes, 1 for consecutive or long integers, else 0."""
    # Minimum number of digits of integers that may be codes.
    min_code_digits = 4
    # Minimum length of values of digits and letters that may be codes. All values must have the same length.
    min_code_length = 6
    # Minimum fraction of the values that follow a pattern of codes.
    min_code_fraction = 0.9
    # Maximum range (maximum minus minimum) of integers that may be running numbers, relative to their count.
    max_relative_range_of_running_numbers = 1.2
    words = levels.tolist() if levels.dtype.kind in "US" else []
    min_alike = min_code_fraction * len(levels)
    if words and not all(word.isdecimal() for word in words):
        patterns = [re.sub(r"\d+", "#", word) for word in words]
        common = max(set(patterns), key=patterns.count)
        if "#" in common and patterns.count(common) >= min_alike:  # s01, s02: a stem and a number
            return 2
        n_codes = sum(bool(re.fullmatch(r"(?=.*\d)[\w-]+", word)) for word in words)
        lengths = {len(word) for word in words}
        equal_length = len(lengths) == 1 and len(words[0]) >= min_code_length
        return 2 if n_codes >= min_alike and equal_length else 0
    numeric = np.sort(levels.astype(np.float64))
    if not np.array_equal(numeric, np.rint(numeric)):
        return 0
    running = numeric[-1] - numeric[0] < max_relative_range_of_running_numbers * len(numeric)
    return int(running or np.abs(numeric).min() >= 10 ** (min_code_digits - 1))


def _log_p_value_bound(level_of: np.ndarray, labels: np.ndarray) -> float:
    """Compute an upper bound of the log p-value of how often rows with the same value have the same class.

    Source: Hoeffding, "Probability inequalities for sums of bounded random variables" (1963), theorem 1.
    """
    # A significance test divides the rows of each value into blocks of this many rows. It counts the blocks whose rows
    # have a single class.
    rows_per_test_block = 4
    order = np.argsort(level_of, kind="stable")
    level, y = level_of[order], labels[order]
    start = np.searchsorted(level, level)  # the first row of the same value
    is_first = (np.arange(len(y)) - start) % rows_per_test_block == 0
    piece = np.cumsum(is_first) - 1
    sizes = np.bincount(piece)
    several = sizes > 1
    differs = y != y[np.flatnonzero(is_first)][piece]
    mixed = (np.bincount(piece, differs) > 0)[several]
    priors = np.bincount(labels) / len(labels)
    expected = 1 - float((priors ** sizes[several][:, None]).sum(axis=1).mean())
    observed = float(mixed.mean())
    if observed >= expected:
        return 0.0
    divergence = (1 - observed) * np.log((1 - observed) / (1 - expected))
    divergence += observed * np.log(observed / expected) if observed else 0.0
    return -len(mixed) * float(divergence)


def _classes_change_seldom(classes: np.ndarray) -> bool:
    """Test whether the classes (m,) of ascending values change less often than classes in random order."""
    change_rate = 1 - float(np.square(np.bincount(classes) / len(classes)).sum())
    expected = (len(classes) - 1) * change_rate
    lower = expected - 2 * float(np.sqrt(expected * (1 - change_rate)))
    return int((classes[1:] != classes[:-1]).sum()) < lower


#: Minimum number of rows of a table; fewer rows may be in order by chance.
MIN_ROWS = 10


def explain_row_index(name: str, column: np.ndarray) -> str:
    """Explain to users why a column of numbers (n,), in file order, seems to be a row index; "" if it seems not."""
    # Maximum range (maximum minus minimum) of distinct integers that are row indices, relative to the number of rows.
    # Ten random integers from twelve are all different in only four of a thousand cases.
    max_relative_range_of_row_indices = 1.2
    n = len(column)
    if n < MIN_ROWS or not np.array_equal(column, np.rint(column)):
        return ""
    ordered = np.sort(column)
    if not (ordered[1:] > ordered[:-1]).all():
        return ""
    if _is_monotonic(column, strictly=True):
        return "distinct integers in the order of the rows"
    if _has_id_word(_split_name(name)):
        return "a distinct identifier for each row"
    return "a distinct number for each row" if ordered[-1] - ordered[0] < max_relative_range_of_row_indices * n else ""


def explain_leakage(column: np.ndarray, labels: np.ndarray) -> str:
    """Explain to users why the numbers (n,) of a column may leak the labels (n,), as a predicate; "" if not."""
    n, ordered = len(column), np.sort(column)
    if n < MIN_ROWS or ordered[0] == ordered[-1]:
        return ""
    n_distinct, monotonic = 1 + int((ordered[1:] != ordered[:-1]).sum()), _is_monotonic(column)
    distinct_integers = n_distinct == n and np.array_equal(column, np.rint(column))
    if not (monotonic or distinct_integers or 2 * n_distinct <= n):  # most columns: tables may have thousands
        return ""
    n_classes = len(np.unique(labels))
    if n_classes < 2:
        return ""
    n_runs = 1 + int((labels[1:] != labels[:-1]).sum())
    if monotonic and n_runs == n_classes and _separates_classes(column, labels, n_classes):
        return "determines the class, as the order of the rows does"
    counts = np.unique(column, return_counts=True)[1]
    if len(counts) == n_classes and counts.min() > 1 and _separates_classes(column, labels, n_classes):
        return "has one value for each class"
    sorted_by_class = distinct_integers and _separates_classes(column, labels, n_classes)
    return "has distinct values that are sorted by class" if sorted_by_class else ""


def _is_monotonic(column: np.ndarray, *, strictly: bool = False) -> bool:
    """Test whether the values (n,) never decrease or never increase; if ``strictly``, nor are adjacent ones equal."""
    before, after = column[:-1], column[1:]
    increases, decreases = (after > before, after < before) if strictly else (after >= before, after <= before)
    return bool(increases.all() or decreases.all())


def _separates_classes(column: np.ndarray, labels: np.ndarray, n_classes: int) -> bool:
    """Test whether each class has an interval of values of the column that contains no values of other classes."""
    order = np.lexsort((labels, column))
    ends = np.flatnonzero(labels[order][1:] != labels[order][:-1])
    return len(ends) == n_classes - 1 and bool((column[order][ends] < column[order][ends + 1]).all())
