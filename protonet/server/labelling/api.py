"""``protonet page``: the labelling page, and the HTTP API that its script calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from protonet._io import remove_stale_server_folders, temporary_server_folder
from protonet._text import escape_control_chars, plural
from protonet.commands.data import get_label_column, load_pipeline, read_cells, read_table_to_label
from protonet.commands.options import PageOptions, replace_argument_names
from protonet.commands.rows import parse_column_types
from protonet.embeddings.pictures import reading
from protonet.errors import UserError, raise_input_error, rename_argument
from protonet.report import columns_to_dicts
from protonet.server import app
from protonet.server.access import AccessPolicy, make_access_policy
from protonet.server.labelling.answers import People
from protonet.server.labelling.class_names import get_similar_class, parse_classes
from protonet.server.labelling.jobs import JobRunner, PageJob
from protonet.server.labelling.label_file import LabelFile
from protonet.server.labelling.queue import MAX_SELECTED_ROWS, LabelQueue
from protonet.server.labelling.review import LabelFilter, list_labels
from protonet.server.labelling.session import LabelSession
from protonet.server.labelling.uploads import Uploads, append_rows, make_empty_picture_table
from protonet.server.parsing import decode_json, parse_body, read_upload
from protonet.tables.columns import COLUMN_TYPES
from protonet.tables.columns.parsing import is_missing, replace_missing_cells
from protonet.tables.formats.source import make_text_array
from protonet.tables.training import TrainingTable
from protonet.ui.html import format_page

#: Maximal pixels per side of a picture on the page.
MAX_PICTURE_SIDE = 640
#: Maximal number of columns of a table that the page describes.
MAX_DESCRIBED_COLUMNS = 400
#: Number of new labels after which the cross-validated accuracy is computed again.
LABELS_PER_ACCURACY_UPDATE = 20
#: Roles that the user can give a column: a type, "drop" or "group"; "" restores the inferred type. "picture" is not
#: among them, because a client could then read any file whose path is in a cell.
COLUMN_ROLES = ("", *(name for name in COLUMN_TYPES if name != "picture"), "drop", "group")
#: Keys of the metrics of a fit (``fit --json``) that are sent to the page.
METRIC_KEYS = ("accuracy", "interval", "balanced_accuracy", "confusion", "classes", "suspects", "rows_of_table", "data")

ResultT = TypeVar("ResultT")
#: A function that answers a `Request` or an `ActionRequest`. It returns a response, or a value that is sent as JSON.
Handler = Callable[[Any], Awaitable[object]]
#: JSON keys of the fields of `ActionRequest` with another name.
ACTION_KEYS = {
    **{"labeller": "by", "class_name": "name", "old_name": "old", "create_class": "create", "shown_label": "seen"},
    **{"listed_person": "person", "column_name": "column", "column_role": "choice", "job_kind": "job"},
}


class ActionRequest(Struct, rename=ACTION_KEYS):
    """The JSON body of a request of the page: the browser tab, and the arguments of an action.

    The action itself, such as "label", is in the path. It uses some of the arguments.
    """

    tab: Annotated[str, Meta(max_length=64)]  #: Identifies the browser tab.
    labeller: Annotated[str, Meta(max_length=100)] = ""  #: The person who gives the label; "" if unknown.
    row: int | None = None  #: Index of a row.
    rows: Annotated[list[int], Meta(max_length=MAX_SELECTED_ROWS)] | None = None  #: Indices of several rows.
    class_name: str | None = None  #: The name of a class.
    old_name: str | None = None  #: The present name of a class to rename.
    create_class: bool = False  #: Whether to create the class even if its name is similar to that of another class.
    shown_label: str | UnsetType | None = UNSET
    """The label of the row on the page: None for no label; UNSET if not sent."""
    listed_person: str | None = None  #: Lists only labels of this person; None for all persons.
    text: str = ""  #: A text to search for, or texts to add as rows, one per line.
    column_name: str | None = None  #: The name of a column.
    column_role: str | None = None  #: The role of the column, from `COLUMN_ROLES`.
    second: bool = False  #: Whether to suggest rows that other people have labelled.
    disputed: bool = False  #: Whether to list only rows to which people gave different answers.
    job_kind: Literal["results", "export"] | None = None  #: The kind of a job to start.

    def __post_init__(self) -> None:
        self.labeller = self.labeller.strip()
        if not self.labeller.isprintable():
            raise ValueError("`by` must be a printable name")


ACTION_DECODER = msgspec.json.Decoder(ActionRequest)


@dataclass
class LabelApi:
    """The routes of the labelling page and its API."""

    queue: LabelQueue
    jobs: JobRunner
    policy: AccessPolicy
    reread_table: Callable[[PageOptions], TrainingTable] | None
    """Reads and encodes the table again with other column roles; None if an initial model determines the columns."""
    uploads: Uploads
    executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2))
    table_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  #: Held while the features of the table change.

    def create_app(self) -> ASGIApp:
        """Create the ASGI application that serves the page and its API."""
        queue = self.queue
        self.jobs.on_end = self.start_due_job  # labels may have been given during the job
        changes: dict[str, Callable[[ActionRequest], object]] = {
            "next": lambda action: None,
            "label": lambda action: queue.label_row(
                action.tab, require_row(action), action.class_name or "", action.labeller
            ),
            "skip": lambda action: queue.skip_row(action.tab, require_row(action), action.labeller),
            "flag": lambda action: queue.flag_row(action.tab, require_row(action)),
            "undo": lambda action: queue.undo_label(
                action.tab, require_row(action), action.shown_label, action.labeller
            ),
            "relabel": lambda action: queue.change_label(
                require_row(action), action.class_name or "", action.labeller, action.shown_label
            ),
            "label_many": lambda action: queue.label_rows(
                action.tab, self.get_rows(action), action.class_name, action.labeller
            ),
            "add_class": lambda action: queue.add_class(action.class_name or ""),
            "rename": lambda action: queue.rename_class(action.old_name or "", action.class_name or ""),
            "undo_rename": lambda action: queue.undo_rename(action.old_name or "", action.class_name or ""),
        }
        posts: dict[str, Handler] = {name: self.make_label_handler(change) for name, change in changes.items()}
        posts |= {"leave": self.close_tab, "rows": self.list_rows, "columns": self.set_column_role}
        posts |= {"add": self.add_texts, "jobs": self.start_job, "labels": self.list_labels}
        uploads: dict[str, Handler] = {"/api/try": self.try_row, "/api/add_picture": self.add_picture}
        gets: dict[str, Handler] = {"/": self.show_page, "/picture": self.show_picture, "/download": self.download}
        gets |= {"/api/state": self.describe_table, "/api/map": self.get_scatter_plot, "/api/jobs": self.list_jobs}
        routes = [
            Route(f"/api/{name}", make_handler(answer, is_action=True), methods=["POST"])
            for name, answer in posts.items()
        ]
        routes += [Route(path, make_handler(answer), methods=["POST"]) for path, answer in uploads.items()]
        routes += [Route(path, make_handler(answer)) for path, answer in gets.items()]
        return app.create_app(self.policy, routes)

    def make_label_handler(self, change: Callable[[ActionRequest], object]) -> Handler:
        """Make the handler of an action on labels, which calls ``change`` and answers with the next row to label.

        If the action has a class name that is similar to an existing one, and does not confirm it by ``create``, the
        handler answers with the existing name and changes nothing.
        """

        async def respond(action: ActionRequest) -> object:
            name, names = action.class_name, self.queue.session.names
            similar = None if action.create_class or not name else get_similar_class(name, names)
            if similar is not None and (action.old_name is None or similar != action.old_name):
                return {"similar": similar}
            change(action)
            self.start_due_job()
            label = {} if action.row is None else {"label": self.queue.session.labels.get(action.row)}
            suggested = self.queue.suggest_row(action.tab, action.labeller, second=action.second)
            return suggested | self.describe_accuracy() | label

        return respond

    def start_due_job(self) -> None:
        """Compute the accuracy again if there are enough new labels since the last time, and no job is running."""
        n_labelled = len(self.queue.session.labelled)
        if n_labelled >= self.jobs.n_fitted_labels + LABELS_PER_ACCURACY_UPDATE and not self.jobs.running_job:
            self.start_job_on_labels("results")

    def start_job_on_labels(self, kind: Literal["results", "export"]) -> None:
        """Start a job, "results" or "export", on the labelled rows, except rows whose pictures no longer exist."""
        queue, session = self.queue, self.queue.session
        rows = {row: [*session.cells[row], label] for row, label in session.labels.items() if queue.has_picture(row)}
        existing, table = [cells for row, cells in enumerate(session.cells) if queue.has_picture(row)], None
        if self.uploads.file.rows or (len(existing) < len(session.cells) and self.jobs.options.table.is_file()):
            table = [queue.column_names, *existing]
        lines = [session.label_file.header, *rows.values()]
        self.jobs.start_job(PageJob(kind, queue.n_changes, list(rows), lines, table))

    def describe_accuracy(self) -> dict[str, object]:
        """Return the cross-validated accuracy, and when it is computed again.

        ``check`` is the accuracy with its interval, or None before the first fit; ``checked`` is the number of labels
        that it was computed from; ``next_check`` is the number of labels until it is computed again, 0 during a fit.
        """
        metrics, jobs = self.jobs.metrics or {}, self.jobs
        keys = ("accuracy", "interval")
        accuracy = {key: metrics[key] for key in keys} if metrics.get("accuracy") is not None else None
        remaining = jobs.n_fitted_labels + LABELS_PER_ACCURACY_UPDATE - len(self.queue.session.labelled)
        next_check = 0 if jobs.running_job else max(remaining, 1)
        return {"check": accuracy, "checked": jobs.n_fitted_labels, "next_check": next_check}

    async def list_labels(self, action: ActionRequest) -> object:
        """Answer with the labelled rows that match the search; rows that are predicted as another class come first."""
        metrics = self.jobs.metrics or {}
        predictions: dict[int, tuple[str, float]] = {}
        if rows := metrics.get("predictions"):
            names = [str(entry["name"]) for entry in metrics["classes"]]
            for index, label, probability in zip(rows["index"], rows["predicted"], rows["probability"], strict=True):
                predictions[metrics["rows_of_table"][index]] = names[label], probability
        chosen = LabelFilter(action.class_name, action.text, action.listed_person, action.disputed)
        return list_labels(self.queue, predictions, chosen)

    async def show_page(self, _: Request) -> object:
        """Answer with the HTML page; its script may send requests to this server only."""
        rules = "connect-src 'self'; img-src 'self' blob: data:"
        title = reading.path_to_text(self.jobs.options.title_path.name)
        return app.html_response(*format_page("label.html", title, {}, ["page.css", "label.css"], "label.js", rules))

    async def describe_table(self, _: object) -> object:
        """Answer with the columns of the table, notes on the table, and command lines that repeat an export."""
        rows, header = self.queue.latest_rows, list(self.queue.column_names)
        names = list(rows.columns or header)
        return {
            "header": header,
            "picture": self.queue.picture_column,
            "adds": "" if self.uploads.content_column is None else "pictures" if self.uploads.are_pictures else "texts",
            "columns": await self.run_in_thread(self.describe_columns) if len(header) <= MAX_DESCRIBED_COLUMNS else [],
            "choices": COLUMN_ROLES if self.reread_table is not None and rows.columns is not None else [],
            "used": names,
            "added": str(self.uploads.file.path),
            "texts": self.queue.picture_column is None and len(names) == 1 and rows.encoding is not None,
            "notes": replace_argument_names(rows.notes),
            "table": str(self.jobs.options.title_path),
            "commands": self.jobs.format_commands(),
            "output": str(self.jobs.options.output),
            "fixed": self.queue.fixed_classes,
            "guidelines": self.jobs.options.guidelines or "",
        }

    def describe_columns(self) -> list[dict[str, object]]:
        """Return the name, type, number of missing cells and user-selected role of each column."""
        rows, header, options = self.queue.latest_rows, list(self.queue.column_names), self.jobs.options
        names, cells = list(rows.columns or header), self.queue.session.cells
        missing = {
            name: int(is_missing(replace_missing_cells(make_text_array([row[at] for row in cells], len(cells)))).sum())
            for at, name in enumerate(header)
        }
        described = columns_to_dicts(names, rows.encoding, [missing[name] for name in names])
        used = {column["name"]: column for column in described}
        choices = {**parse_column_types(options.column_type), **dict.fromkeys(options.drop, "drop")}
        choices |= {} if options.group is None else {options.group: "group"}
        unused = [{"name": name, "type": "not used", "missing": missing[name]} for name in header if name not in used]
        return [{**column, "choice": choices.get(column["name"], "")} for column in [*used.values(), *unused]]

    async def set_column_role(self, action: ActionRequest) -> object:
        """Set the role of a column (a type, "drop" or "group"), encode the table again, and start a new fit."""
        name, choice, options = str(action.column_name), str(action.column_role), self.jobs.options
        if self.reread_table is None:
            raise HTTPException(409, "The columns are those of the model. Start without -m to change them.")
        if name not in self.queue.column_names:
            raise_input_error("column", "be one of the table", escape_control_chars(name)[:40], "Load the page again.")
        if choice not in COLUMN_ROLES:
            must = f"be one of {', '.join(COLUMN_ROLES[1:])}, or empty"
            raise_input_error("choice", must, escape_control_chars(choice)[:20], "Choose one.")
        pictures = self.queue.picture_column is not None and name == self.queue.column_names[self.queue.picture_column]
        if pictures and choice:
            line = f"`column` must not be that of the pictures; got {escape_control_chars(name)[:40]}."
            raise HTTPException(409, line)
        types = {other: kind for other, kind in parse_column_types(options.column_type).items() if other != name}
        if choice not in {"drop", "group"} and (pictures or choice):
            types[name] = "picture" if pictures else choice
        changed = replace(
            options,
            column_type=[f"{other}={kind}" for other, kind in types.items()],
            drop=[*(other for other in options.drop if other != name), *[name] * (choice == "drop")],
            group=name if choice == "group" else None if options.group == name else options.group,
        )
        read_again = self.reread_table
        async with self.table_lock:
            try:
                rows = await self.run_in_thread(lambda: read_again(changed))
            except UserError as error:
                raise rename_argument(error, "columns") from None
            self.jobs.options = changed
            self.queue.replace_rows(rows)
        return await self.describe_table(action)

    async def close_tab(self, action: ActionRequest) -> object:
        """Release the row of a closed browser tab, so that the row can be suggested to other tabs."""
        self.queue.release_row(action.tab)
        return {}

    def get_rows(self, action: ActionRequest) -> list[int]:
        """Return the row indices of an action; raise an InputError if there are none, or one is not in the table."""
        rows, n = action.rows, len(self.queue.session.cells)
        if rows is None or not all(0 <= row < n for row in rows):
            must = f"be up to {MAX_SELECTED_ROWS} row indices"
            raise_input_error("rows", must, "something else", "Load the page again.")
        return rows

    async def list_rows(self, action: ActionRequest) -> object:
        """Answer with the cells of the requested rows."""
        return list(map(self.queue.row_to_dict, self.get_rows(action)))

    async def get_scatter_plot(self, _: Request) -> object:
        """Answer with the points of the page's scatter plot, computed by `LabelQueue.compute_scatter_plot`."""
        return await self.run_in_thread(self.queue.compute_scatter_plot)

    async def list_jobs(self, _: object) -> object:
        """Answer with the state of the jobs: running, error, metrics of the last fit, and names of exported files."""
        jobs = self.jobs
        metrics = None if jobs.metrics is None else {key: jobs.metrics.get(key) for key in METRIC_KEYS}
        if metrics is not None and (rows := (jobs.metrics or {}).get("predictions")):
            metrics["rows"] = {key: rows[key] for key in ("index", "label", "predicted", "probability")}
        state: dict[str, object] = {"running": jobs.running_job, "error": jobs.error_message, "metrics": metrics}
        state |= {"ready": jobs.list_exported_files(), "fresh": jobs.metrics_version == self.queue.n_changes}
        return state | self.queue.count_progress() | self.describe_accuracy()

    async def start_job(self, action: ActionRequest) -> object:
        """Start the job that an action names, and answer with the state of the jobs."""
        if action.job_kind is None:
            raise_input_error("job", "be results or export", "nothing", "Load the page again.")
        self.start_job_on_labels(action.job_kind)
        return await self.list_jobs(action)

    async def try_row(self, request: Request) -> object:
        """Classify the one row in the body of a request, and answer with the prediction and its explanation."""
        base = self.queue.build_model()
        names = self.jobs.options.representation
        model = await self.run_in_thread(lambda: base.with_loaded_encoders(names, show_progress=False, use_cache=False))
        media, body = await read_upload(request)
        rows = await self.run_in_thread(lambda: parse_body(model, media, body))
        if len(rows.x) != 1:
            raise_input_error("body", "hold one row", len(rows.x), "Send one.")
        result = await self.run_in_thread(lambda: self.queue.try_row(model, rows))
        return result | {"notes": rows.notes}

    async def add_texts(self, action: ActionRequest) -> object:
        """Add each line of an action's text to the table as a row, and answer with the number of new rows."""
        return await self.add_rows(lambda known: self.uploads.add_texts(action.text, known))

    async def add_picture(self, request: Request) -> object:
        """Add the picture in the body of a request to the table as a row."""
        name, content = request.query_params.get("name", ""), await request.body()
        return await self.add_rows(lambda known: self.uploads.add_picture(name, content, known))

    async def add_rows(self, save: Callable[[set[str]], list[list[str]]]) -> object:
        """Save new rows, add them to the table, and answer with their number and the index of the first one.

        ``save`` is called with the texts (or picture paths) of the table, and returns the cells of each new row.
        """
        async with self.table_lock:
            queue, column = self.queue, self.uploads.content_column or 0
            if queue.latest_rows is not queue.session.rows:
                raise HTTPException(409, "The columns are being changed. Try again.")
            first = len(queue.session.cells)
            added = await self.run_in_thread(lambda: save({line[column] for line in queue.session.cells}))
            if added:
                rows, names = queue.latest_rows, queue.column_names
                queue.add_rows(added, await self.run_in_thread(lambda: append_rows(rows, names, added)))
        new = {"added": len(added), "row": first if added else None}
        return new | queue.count_progress() | self.describe_accuracy()

    async def show_picture(self, request: Request) -> Response:
        """Answer with the picture of a row, decoded and encoded again as PNG."""
        row, cells = request.query_params.get("row", ""), self.queue.session.cells
        if self.queue.picture_column is None or not row.isdecimal() or len(row) > 9 or int(row) >= len(cells):
            raise HTTPException(404, "`row` must be one with a picture; got another one. Load the page again.")
        path = reading.text_to_path(cells[int(row)][self.queue.picture_column])
        try:
            png = await self.run_in_thread(lambda: reading.convert_to_png(path, MAX_PICTURE_SIDE))
            return Response(png, media_type="image/png")
        except reading.UNREADABLE_IMAGE_ERRORS as error:
            line = f"This picture cannot be read: {reading.path_to_text(path)} ({reading.describe_image_error(error)})"
            raise HTTPException(404, line) from None

    async def download(self, request: Request) -> Response:
        """Answer with an exported file, or with the file of labels."""
        name = request.query_params.get("file", "")
        if name == "labelled":
            return FileResponse(self.jobs.options.output, media_type="text/csv", filename="labelled.csv")
        path, media = self.jobs.get_exported_file(name)
        return FileResponse(path, media_type=media, filename=path.name)

    async def run_in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        """Call a function in a worker thread, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)


def make_handler(answer: Handler, *, is_action: bool = False) -> Callable[[Request], Awaitable[Response]]:
    """Make the handler of a route from ``answer``, a function of the request or, as ``is_action``, of its action."""

    async def respond(request: Request) -> Response:
        value = await answer(decode_json(await request.body(), ACTION_DECODER) if is_action else request)
        return value if isinstance(value, Response) else app.json_response(value)

    return respond


def require_row(action: ActionRequest) -> int:
    """Return the row index of an action; raise an InputError if the action has none."""
    if action.row is None:
        raise_input_error("row", "be a whole number", "nothing", "Load the page again.")
    return action.row


def run(options: PageOptions) -> None:
    """Serve the labelling page until SIGTERM or Ctrl-C."""
    max_body_bytes = 32 * 2**20  # maximal bytes of a body, such as a picture
    policy = make_access_policy(options.host, options.allowed_hosts, max_body_bytes)
    policy.response_timeout_seconds = 120.0
    listening = app.open_listening_socket(options.host, options.port)
    model = None if options.model is None else load_pipeline(options, options.model, options.table)
    classes = parse_classes(options.classes, model)
    label = get_label_column(options.label, model)
    output = options.output

    def read_rows(options: PageOptions, pictures: Sequence[str] = ()) -> TrainingTable:
        if options.starts_empty:
            return make_empty_picture_table(pictures, options.representation, show_progress=not options.quiet)
        return read_table_to_label(options, model, label)

    rows = read_rows(options)
    header, cells = (["picture"], []) if options.starts_empty else read_cells(options, options.table, model, label)
    del cells[len(rows.x) :]  # totals at the end, which `read_rows` leaves out
    with ExitStack() as stack:
        label_file = stack.enter_context(LabelFile(output, [*header, label], None))
        flagged = stack.enter_context(LabelFile(output.with_suffix(".flagged.csv"), [*header, "flag"], ["flagged"]))
        people = stack.enter_context(LabelFile(output.with_suffix(".by.csv"), ["by", *header, label], None, lazy=True))
        answered = LabelFile(output.with_suffix(".answers.csv"), ["by", *header, label], None, lazy=True)
        stack.enter_context(answered)
        added = LabelFile(output.with_suffix(".added.csv"), [*header, "added"], ["added"], lazy=True)
        stack.enter_context(added)
        if rows.has_label.any() and not label_file.rows:  # labels of the table are reviewed like those of the page
            labelled = rows.has_label.nonzero().flatten().tolist()
            label_file.replace_rows([[*cells[row], str(rows.rows.labels[row])] for row in labelled])
        modalities = [] if rows.encoding is None else [column.modality for column in rows.encoding.columns]
        picture = header.index((rows.columns or ())[modalities.index("picture")]) if "picture" in modalities else None
        column = header.index((rows.columns or header)[0]) if len(modalities) == 1 and modalities[0] else None
        uploads = Uploads(added, options.table, column, picture is not None)

        def add_uploads(rows: TrainingTable) -> TrainingTable:
            no_labels = replace(rows, rows=rows.rows._replace(columns=[], labels=np.empty(0, np.str_)))
            return append_rows(no_labels, header, [cells for *cells, _ in added.rows])

        def read_again(options: PageOptions) -> TrainingTable:
            return add_uploads(read_rows(options, [cells[column or 0] for cells in added.rows]))

        rows = read_again(options) if options.starts_empty else add_uploads(rows)
        session = LabelSession(rows, [*cells, *(line for *line, _ in added.rows)], classes, model, label_file)
        names = dict.fromkeys(row[-1] for row in label_file.rows)
        session.names.extend(name for name in names if name not in session.names)
        if picture is not None and header[picture] not in parse_column_types(options.column_type):
            # `fit` sees only the paths in the answers
            options = replace(options, column_type=[f"{header[picture]}=picture", *options.column_type])
        queue = LabelQueue(session, flagged, People(people, answered), header, picture, model)
        remove_stale_server_folders()
        jobs = JobRunner(options, label, stack.enter_context(temporary_server_folder()))
        api = LabelApi(queue, jobs, policy, None if model is not None else read_again, uploads)
        status = f"{plural(len(session.cells), 'row')}, {plural(len(label_file.rows), 'answer')} in {output}; label at"
        with queue.fit_in_background():
            app.run_server(api.create_app(), policy, listening, status)
    answers = plural(len(label_file.rows), "answer")
    print(f"{answers} in {output}: the same command goes on, and fit and update take them")
