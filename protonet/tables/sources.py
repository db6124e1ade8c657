"""Columns that name the sources of rows, such as persons: their values come again, each nearly always with one class.

So do those of a feature that tells the class, such as a city of a country. What speaks for a source is counted.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class SourceRules:
    """When a column names sources; tests/tables/test_sources.py has tables that were not looked at for these."""

    least: int = 8  #: Values that come again, at least, and for each class so many: ...
    per_class: int = 3  #: ... of fewer, a feature of the world may well tell the class.
    covered: float = 0.5  #: Of the rows, those whose value comes again, at least.
    wrong: float = 0.13  #: Of those rows, the ones of another class than most of their value, at most.
    piece: int = 4  #: Rows of one value are cut into pieces of so many: whether each is of one class is counted.
    chance: float = 1e-3  #: The probability, at most, of so many that are, if class and value were independent, ...
    chance_named: float = 0.05  #: ... and where the column's name is that of a source, which needs less proof.
    even: float = 0.25
    """Values have equal numbers of rows if the variance of these is at most this part of their mean; of rows that are
    drawn at random it is about the mean."""
    digits: int = 4  #: Whole numbers that are no running numbers may be codes if all have so many digits, ...
    code: int = 6  #: ... and words of digits and letters if all have one length, of at least this.
    alike: float = 0.9  #: Of the values, those that are written in the same way, at least.
    dense: float = 1.2  #: Running numbers span at most this many times as many values as there are.
    asked: int = 2  #: Points of evidence from which a person is asked, ...
    sure: int = 3  #: ... and from which `--group` is advised.


SOURCES = SourceRules()
#: What rows come from, in lower case, without accents: English, German, French, Spanish, Portuguese, Italian, Dutch,
#: Polish, Russian; and as they are written in Chinese, Japanese, Korean.
_NOUNS = (
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
_IDS = "id|ids|uid|uuid|guid|idx|ident|identifier|kennung"
_ENDS = f"{_IDS}|nr|no|num|nummer|numero|number|code|codigo|kode|key|name|index|编号|代码|番号|号|번호"
_SOURCE = re.compile(f"(?:{_NOUNS})(?:(?:e?n|s)?(?:{_ENDS}))?")
_END, _ID = re.compile(_ENDS), re.compile(_IDS)


class Sources(NamedTuple):
    """What a column seems to name."""

    points: int  #: Of evidence, `SourceRules.asked` or more.
    size: int  #: How many values come again.

    @property
    def sure(self) -> bool:
        """Whether there is enough evidence for advice, and not only for a question."""
        return self.points >= SOURCES.sure


def find_sources(name: str, values: np.ndarray, labels: np.ndarray, *, ordered: bool) -> Sources | None:
    """Look whether a column names sources of rows: its values tell the class, and there are points for it.

    Three points where the column's name is that of a source (subject, patient, session, in several languages), one
    where it says no more than "id"; two where values are written as codes are (s01, P-17, 3f9a2c01), one for running
    numbers and such of many digits; one where each value has its rows one behind the other; and one where values have
    equal numbers of rows, more equal than chance gives.

    Args:
        name: Of the column.
        values: (n,) in the order of the file, strings or numbers.
        labels: (n,) the classes.
        ordered: Whether the values are in an order that means something, as numbers are: if so, and unless the name
            speaks against it, they are a feature where the class changes seldom from the least to the largest.

    Returns:
        What it seems to name; None where it may well be a feature of the world.
    """
    sorted_values = np.sort(values)
    if not (sorted_values[1:] == sorted_values[:-1]).any():  # none comes again: most of thousands
        return None
    n, (classes, y) = len(labels), np.unique(labels, return_inverse=True)
    levels, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    again = counts > 1
    least = max(SOURCES.least, SOURCES.per_class * len(classes))
    rows = int(counts[again].sum())
    if again.sum() < least or rows < SOURCES.covered * n:
        return None
    seen = np.bincount(places * len(classes) + y, minlength=len(levels) * len(classes)).reshape(len(levels), -1)[again]
    if rows - seen.max(axis=1).sum() > SOURCES.wrong * rows:
        return None
    named = read_name(name)
    source = named == SOURCES.sure
    chance = SOURCES.chance_named if source else SOURCES.chance
    if _bound_chance(places, y) > np.log(chance):
        return None
    in_blocks = 1 + int((places[1:] != places[:-1]).sum()) == len(levels)
    if ordered and not source and not in_blocks and _is_smooth(seen.argmax(axis=1)):
        return None
    is_even = counts[again].var() <= SOURCES.even * counts[again].mean()
    points = named + weigh_values(levels) + in_blocks + int(is_even)
    return Sources(points, len(seen)) if points >= SOURCES.asked else None


def read_name(name: str) -> int:
    """Return the points for a column's name: its last word counts, or a word or two before an "id" or a number.

    "patient", "Patient_ID", "id_paciente", "subjectNo" and "Probandennummer" name a source, "patient_age" does not.
    """
    plain = "".join(each for each in unicodedata.normalize("NFKD", name) if not unicodedata.combining(each))
    plain = unicodedata.normalize("NFC", plain)  # Korean is written in parts else
    words = [word.lower() for word in re.findall(r"[^\W\d_]+", re.sub("(?<=[a-z])(?=[A-Z])", " ", plain))]
    is_id = any(_ID.fullmatch(word) for word in words[:1] + words[-1:])
    while len(words) > 1 and _END.fullmatch(words[-1]):
        words.pop()
    if words and _SOURCE.fullmatch(words[-1]):
        return SOURCES.sure
    return int(is_id)


def weigh_values(levels: np.ndarray) -> int:
    """Return the points for how different values (m,), in ascending order, are written."""
    words = levels.tolist() if levels.dtype.kind in "US" else []
    most = SOURCES.alike * len(levels)
    if words and not all(word.isdecimal() for word in words):
        forms = [re.sub(r"\d+", "#", word) for word in words]
        common = max(set(forms), key=forms.count)
        if "#" in common and forms.count(common) >= most:  # s01, s02: one stem, and numbers
            return 2
        mixed = sum(bool(re.fullmatch(r"(?=.*\d)[\w-]+", word)) for word in words)
        one_length = len({len(word) for word in words}) == 1 and len(words[0]) >= SOURCES.code
        return 2 if mixed >= most and one_length else 0
    numbers = np.sort(levels.astype(np.float64))
    if not np.array_equal(numbers, np.rint(numbers)):
        return 0
    dense = numbers[-1] - numbers[0] < SOURCES.dense * len(numbers)
    return int(dense or np.abs(numbers).min() >= 10 ** (SOURCES.digits - 1))


def _bound_chance(places: np.ndarray, labels: np.ndarray) -> float:
    """Return the logarithm of a bound of how likely so many pieces of one class are, without any dependence.

    Args:
        places: (n,) int64, the value of each row.
        labels: (n,) int64, its class.

    Source: Hoeffding, "Probability inequalities for sums of bounded random variables" (1963), theorem 1.
    """
    order = np.argsort(places, kind="stable")
    value, y = places[order], labels[order]
    start = np.searchsorted(value, value)  # where the rows of its value begin
    within = np.arange(len(y)) - start
    first = within % SOURCES.piece == 0
    piece = np.cumsum(first) - 1
    sizes = np.bincount(piece)
    several = sizes > 1
    differs = y != y[np.flatnonzero(first)][piece]
    mixed = (np.bincount(piece, differs) > 0)[several]
    shares = np.bincount(labels) / len(labels)
    expected = 1 - float((shares ** sizes[several][:, None]).sum(axis=1).mean())
    share = float(mixed.mean())
    if share >= expected:
        return 0.0
    rest = (1 - share) * np.log((1 - share) / (1 - expected))
    return -len(mixed) * float(rest + (share * np.log(share / expected) if share else 0.0))


def _is_smooth(classes: np.ndarray) -> bool:
    """Return whether the class (m,) changes less often from one value to the next than chance gives."""
    share = 1 - float(np.square(np.bincount(classes) / len(classes)).sum())
    changes = (len(classes) - 1) * share
    least = changes - 2 * float(np.sqrt(changes * (1 - share)))
    return int((classes[1:] != classes[:-1]).sum()) < least
