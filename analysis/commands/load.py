"""A load generator in a process of its own: connections that ask one after the other, over plain sockets."""

from __future__ import annotations

import asyncio
import json
import sys
import time


async def ask(host: str, port: int, request: bytes, until: float, most: int, told: dict[str, list[float]]) -> None:
    """Ask again and again on one connection, which is opened anew where the server closes it."""
    reader = writer = None
    while time.perf_counter() < until and len(told["seconds"]) < most:
        if writer is None:
            try:
                reader, writer = await asyncio.open_connection(host, port)
            except OSError:  # no request was sent
                told["refused"].append(time.time())
                await asyncio.sleep(0.01)
                continue
        assert reader is not None
        started = time.perf_counter()
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            told["lost"].append(time.time())
            writer = None
            continue
        seconds = time.perf_counter() - started
        if head.startswith(b"HTTP/1.1 200"):
            told["seconds"].append(seconds)
        else:
            told["failed"].append(int(head[9:12]))
            told["lines"] = [body.decode()]  # type: ignore[list-item]
        if b"connection: close" in head.lower():
            writer.close()
            writer = None


async def load(settings: dict[str, object]) -> dict[str, object]:
    """Ask over so many connections for so many seconds, or so many requests; return what came of it."""
    body, headers = str(settings["body"]).encode(), str(settings["headers"])
    head = f"POST {settings['path']} HTTP/1.1\r\nHost: 127.0.0.1:{settings['port']}\r\n{headers}"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    told: dict[str, list[float]] = {"seconds": [], "lost": [], "refused": [], "failed": []}
    started = time.perf_counter()
    until, most = started + float(str(settings["limit"])), int(str(settings["requests"]))
    port = int(str(settings["port"]))
    asks = [ask("127.0.0.1", port, request, until, most, told) for _ in range(int(str(settings["connections"])))]
    await asyncio.gather(*asks)
    spent, ordered = time.perf_counter() - started, sorted(told["seconds"])
    quantiles = {
        str(share): ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
        for share in (0.5, 0.95, 0.99, 1.0)
    }
    counts = {name: len(told[name]) for name in ("lost", "refused", "failed")}
    cpu = time.process_time()
    return {
        "answered": len(ordered),
        "elapsed": spent,
        "cpu": cpu,
        **counts,
        "quantiles": quantiles,
        "told": told.get("lines"),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(load(json.loads(sys.stdin.read())))))
