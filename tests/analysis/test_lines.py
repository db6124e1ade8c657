"""The study that counts lines."""

from __future__ import annotations

from textwrap import dedent

import pytest

from analysis.lines import KINDS, count_lines, list_files
from solution.pack import ROOT

SOURCE = dedent('''\
    """A module.

    Blank lines of its docstring are documentation.
    """

    # why this number
    A = 3  # code, whatever its comment says
    #: what B is
    B = """text
    with # no comment
    """


    class C:
        """A class."""

        field: int = 1
        """What the field is."""

        def f(self):  # code
            # a reason
            return """not a docstring"""
''')


def test_each_line_is_of_one_kind() -> None:
    assert count_lines(SOURCE) == {"code": 8, "documentation": 7, "comments": 2, "blank": 5}
    assert count_lines("") == {}


def test_all_lines_of_all_files_are_counted() -> None:
    files = dict(list_files(ROOT))
    assert {"protonet", "protonet.views", "analysis.shared", "solution", "tests.episodes"} <= files.keys()
    for path in files.values():
        source = path.read_text(encoding="utf-8")
        counts = count_lines(source)
        assert counts.total() == len(source.splitlines())
        assert counts.keys() <= {*KINDS}
        assert counts["blank"] <= sum(not line.strip() for line in source.splitlines())


def test_text_that_is_no_source_is_refused() -> None:
    with pytest.raises(SyntaxError):
        count_lines("def f(:)\n    pass\n")
