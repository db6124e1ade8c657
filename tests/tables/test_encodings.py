"""Encodings of text: those that are given, those that are detected, and those that cannot be."""

from __future__ import annotations

import codecs
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from protonet.datasets import load_csv
from protonet.errors import InputError, MissingPackageError
from protonet.tables.formats import open_table_source

WORDS = {
    "cp1251": "дуб вяз ясень глина песок торф клён сосна",
    "cp932": "粘土 砂 泥炭 トネリコ 楡の木 樫の木 東京 大阪",
    "gb18030": "橡树 榆树 白蜡树 黏土 沙子 泥炭 北京 上海",
    "cp949": "참나무 느릅나무 물푸레 점토 모래 토탄 서울 부산",
    "koi8_r": "дуб вяз ясень глина песок торф клён сосна",
    "cp1253": "δρυς φτελιά μελία άργιλος άμμος τύρφη ύψος τάξη",
    "cp1252": "chêne élevé naïve größe süß mañana Eiche Ulme",
}


def make_table(words: str, delimiter: str = ",", rows: int = 40) -> str:
    draw = random.Random(0)
    soils, kinds = words.split()[:4], words.split()[4:]
    lines = [[f"{draw.gauss(10, 2):.2f}", draw.choice(soils), draw.choice(kinds)] for _ in range(rows)]
    return "\n".join(map(delimiter.join, [["height", "soil", "kind"], *lines])) + "\n"


@pytest.mark.parametrize("encoding", WORDS)
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_encodings_are_detected_or_given(encoding: str, delimiter: str, tmp_path: Path) -> None:
    text, path = make_table(WORDS[encoding], delimiter), tmp_path / "x.csv"
    path.write_bytes(text.encode(encoding))
    expected = [line.split(delimiter)[1] for line in text.splitlines()[1:]]
    for given in (None, encoding):
        source = open_table_source(path, encoding=given)
        (chunk,) = source.read_chunks([1])
        assert chunk.columns[0].tolist() == expected
        named = f"the file is not UTF-8: read as {encoding}; `encoding` names another encoding"
        assert (named in source.notes) == (given is None)


def test_unicode_is_never_guessed(tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        for given in (None, encoding):
            (tmp_path / "x.csv").write_bytes(make_table(WORDS["gb18030"]).encode(encoding))
            source = open_table_source(tmp_path / "x.csv", encoding=given)
            assert (source.header, source.notes) == (["height", "soil", "kind"], [])


@pytest.mark.parametrize("encoding", ["cp932", "gb18030", "cp949", "koi8_r"])
def test_a_single_row_is_read_in_the_usual_encoding(encoding: str, tmp_path: Path) -> None:
    for word in WORDS[encoding].split():
        (tmp_path / "x.csv").write_bytes(f"soil,kind\n{word},1\n".encode(encoding))
        source = open_table_source(tmp_path / "x.csv", usual_encoding=encoding)
        (chunk,) = source.read_chunks([0])
        assert (chunk.columns[0].tolist(), source.encoding) == ([word], encoding)
    (tmp_path / "x.csv").write_text(f"soil,kind\n{word},1\n", encoding="utf-8")
    assert open_table_source(tmp_path / "x.csv", usual_encoding=encoding).encoding is None


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_unicode_without_a_byte_order_mark_is_guessed(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(make_table(WORDS["gb18030"]).encode(encoding))
    source = open_table_source(tmp_path / "x.csv")
    assert source.header == ["height", "soil", "kind"]
    assert source.notes == [f"the file is not UTF-8: read as {encoding}; `encoding` names another encoding"]


@pytest.mark.parametrize("order", ["le", "be"])
def test_byte_order_marks_of_utf_32_are_known(order: str, tmp_path: Path) -> None:
    mark = {"le": codecs.BOM_UTF32_LE, "be": codecs.BOM_UTF32_BE}[order]
    (tmp_path / "x.csv").write_bytes(mark + make_table(WORDS["gb18030"]).encode(f"utf-32-{order}"))
    for encoding in (None, "utf-32"):
        assert open_table_source(tmp_path / "x.csv", encoding=encoding).header == ["height", "soil", "kind"]


def test_load_csv_takes_the_encoding(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes("рост,label\n1,дуб\n2,вяз\n".encode("koi8_r"))
    data = load_csv(tmp_path / "x.csv", encoding="koi8_r")
    assert data.class_names == ("вяз", "дуб")
    np.testing.assert_array_equal(data.x, [[1], [2]])


def test_text_that_cannot_be_decoded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(make_table(WORDS["cp1251"]).encode("cp1251"))
    with pytest.raises(InputError, match=r"^`encoding` must name an encoding; got 'cp1521'\. For example utf-8"):
        open_table_source(path, encoding="cp1521")
    with pytest.raises(InputError, match=r"^`path` must be a CSV file .* \(no ASCII in line 2\).*pass `encoding`"):
        open_table_source(path, encoding="ascii")
    for name in ("hex", ""):
        with pytest.raises(InputError, match=f"^`encoding` must name an encoding; got '{name}'"):
            open_table_source(path, encoding=name)
    with pytest.raises(InputError, match=r"^`encoding` must name an encoding; got 'hex'"):
        open_table_source(path, encoding="hex")
    assert open_table_source(path, usual_encoding="hex").encoding == "cp1251"  # model files are not trusted
    with pytest.raises(InputError, match=r"^`encoding` must come with a file of text"):
        open_table_source(tmp_path / "x.npz", encoding="ascii")
    monkeypatch.setitem(sys.modules, "charset_normalizer", None)
    with pytest.raises(MissingPackageError, match=r"^`charset_normalizer` must be installed\. Run pip install"):
        open_table_source(path)
    assert open_table_source(path, encoding="cp1251").notes == []
