"""Requests of all sorts, with and without sense."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence


def make_requests(
    seed: int, n: int, paths: Sequence[str], token: str
) -> Iterator[tuple[str, str, bytes, dict[str, str]]]:
    """Yield requests of all sorts: methods, paths with and without sense, headers and bodies of noise."""
    draw = random.Random(seed)
    parts = ["..", "%2e%2e", "etc", "passwd", "models", "predict", "", "%00", "a" * 300, "é", "?", "token=x", "//", "%"]
    media = ["application/json", "text/csv", "application/x-npy", "image/png", "multipart/form-data; boundary=x", "x"]
    bodies = [b"", b"{}", b"[[", b"[" * 3000, b"null", b"a,b\n1", b'{"row": -1}', b'{"rows":[[1e999]]}']
    bodies += [b"\x1f\x8b\x08", b"\x93NUMPY\x01\x00v\x00{", b"\x89PNG\r\n\x1a\n"]
    bodies += [b'{"rows":[{"\\ud800":null}]}', b'{"rows":[["\\ud800"]]}']
    for _ in range(n):
        path = draw.choice([*paths, "/" + "/".join(draw.choices(parts, k=draw.randint(1, 6)))])
        noise = bytes(draw.randrange(256) for _ in range(draw.randint(0, 60)))
        headers = {"Content-Type": draw.choice(media)}
        if draw.random() < 0.3:
            headers["Authorization"] = draw.choice(["Bearer x", "Bearer", "Basic x", f"Bearer {token}"])
        if draw.random() < 0.2:
            headers["Host"] = draw.choice(["evil.example", "127.0.0.1:1@evil.example", "[::1", "", "localhost.evil"])
        if draw.random() < 0.2:
            headers["Origin"] = draw.choice(["http://evil.example", "null", "file://"])
        safe = path.encode("ascii", "ignore").decode().replace(" ", "")
        yield draw.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS"]), safe, draw.choice([*bodies, noise]), headers
