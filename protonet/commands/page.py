"""``python -m protonet page``: label, look and try in a browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from protonet.commands.answers import Answers
from protonet.commands.data import Taken, read_cells, read_unlabelled
from protonet.commands.label import Session, parse_classes
from protonet.commands.models import name_label, open_model
from protonet.commands.rows import parse_kinds
from protonet.commands.server.desk import Desk
from protonet.commands.server.jobs import Jobs
from protonet.commands.server.room import Room
from protonet.commands.server.running import make_door, open_socket, run_server
from protonet.representations.pictures.images import path_to_text
from protonet.ui.text import count

#: Bytes of a body: of a picture to be tried.
MOST_BYTES = 32 * 2**20


def run(options: argparse.Namespace) -> None:
    """Answer a browser until SIGTERM or Ctrl-C.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        OSError: The answers cannot be written.
        InputError: Arguments, a model, a table or a file of answers that do not fit.
    """
    door = make_door(options.host, options.names, MOST_BYTES, seconds=120.0)
    listening = open_socket(options.host, options.port)
    model = None if options.model is None else open_model(options, argument="--model")
    classes = [] if model is None and options.classes is None else parse_classes(options.classes, model)
    label = name_label(options.label, model)
    taken = Taken(parse_kinds(options.column), tuple(options.drop), options.group)
    rows = read_unlabelled(options, model, label, taken)
    header, cells = read_cells(options, model, label)
    output, flags = options.outputs["output"], options.outputs["flags"]
    with Answers(output, [*header, label], None) as answers, Answers(flags, [*header, "flag"], ["flagged"]) as flagged:
        found = [told[-1] for told in answers.rows]
        session = Session(rows, cells, classes, model, answers)
        session.names.extend(name for name in dict.fromkeys(found) if name not in session.names)
        takes = [column.takes for column in rows.encoding.columns] if rows.encoding else []
        picture = header.index((rows.columns or ())[takes.index("picture")]) if "picture" in takes else None
        more = [] if options.representation is None else ["--representation", *options.representation]
        more += [] if options.sheet is None else ["--sheet", options.sheet]
        if picture is not None:  # of the answers, `fit` sees paths alone
            taken = taken._replace(kinds={header[picture]: "picture", **taken.kinds})
        jobs = Jobs(output, options.table, label, options.model, taken, more)
        reread = None if model is not None else lambda said: read_unlabelled(options, None, label, said)
        desk, title = Desk(session, flagged, header), path_to_text(Path(options.table).name)
        room = Room(desk, jobs, door, title, picture, options.representation, reread)
        kept = f"{count(len(cells), 'row')}, {count(len(answers.rows), 'answer')} in {output}; label at"
        with desk.learning(), jobs.folder:
            run_server(room.make_app(), door, listening, kept)
    print(f"{count(len(answers.rows), 'answer')} in {output}: the same command goes on, and fit and update take them")
