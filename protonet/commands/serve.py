"""``python -m protonet serve``: models that programs ask over HTTP."""

from __future__ import annotations

import argparse

from protonet.commands.server.api import Api
from protonet.commands.server.running import make_door, open_socket, run_server
from protonet.commands.server.served import open_models, watch_files
from protonet.ui.text import count


def run(options: argparse.Namespace) -> None:
    """Answer until SIGTERM or Ctrl-C.

    Raises:
        MissingPackageError: A package that a model needs is missing.
        InputError: Arguments or a model that do not fit.
    """
    models = open_models(options.models, options.representation)
    limits = {"most_requests": options.most_requests, "seconds": options.seconds}
    door = make_door(options.host, options.names, options.most_megabytes * 2**20, **limits)
    listening = open_socket(options.host, options.port)
    with watch_files(list(models.values())):
        run_server(Api(models, door).make_app(), door, listening, f"{count(len(models), 'model')} at")
