"""A reward service on this machine, and the async function that asks it; worker processes import the latter from here.

The service answers with a tenth of the text's length and misbehaves on request.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from types import TracebackType
from typing import Any

import httpx

CLIENTS: dict[str, httpx.AsyncClient] = {}


async def ask(response: str, row: dict[str, Any]) -> float:
    """The reward that the service at row["url"] gives to the response."""
    client = CLIENTS.setdefault(row["url"], httpx.AsyncClient(timeout=30.0))
    answer = await client.post(row["url"], json={"response": response})
    answer.raise_for_status()
    return float(answer.json()["reward"])


class RewardService:
    """An HTTP server in a thread, that counts what it sees.

    Texts that start with `fail N ` get status 500, and those with `drop N ` a closed connection, N times each before
    they are answered; `hang` is never answered.
    """

    def __init__(self, *, expected_at_once: int) -> None:
        self.requests: Counter[str] = Counter()
        """By text."""
        self.most_in_flight = 0
        self.num_connections = 0
        self.url = ""
        self._in_flight = 0
        self._expected_at_once = expected_at_once
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reward service")

    def __enter__(self) -> RewardService:
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._enough_at_once = asyncio.Event()
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/score"
        self._started.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while (body := await _read_request(reader)) is not None:
                self._in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self._in_flight)
                if self.most_in_flight >= self._expected_at_once:
                    self._enough_at_once.set()
                try:
                    answer = await self._answer(json.loads(body)["response"])
                finally:
                    self._in_flight -= 1
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, text: str) -> bytes | None:
        """The bytes of an answer; None for a connection that is to be closed without one."""
        self.requests[text] += 1
        if text == "hang":
            await self._stop.wait()
        # Whoever asks one at a time waits here in vain, and then goes on.
        with_patience = asyncio.wait_for(self._enough_at_once.wait(), 5.0)
        await asyncio.gather(with_patience, return_exceptions=True)
        words = text.split()
        if words[0] in ("fail", "drop") and self.requests[text] <= int(words[1]):
            return _encode(500, {}) if words[0] == "fail" else None
        return _encode(200, {"reward": len(text) / 10})


async def _read_request(reader: asyncio.StreamReader) -> bytes | None:
    """The body of the next request; None when the client has closed the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return await reader.readexactly(int(lengths[0].partition(b":")[2]))


def _encode(status: int, answer: dict[str, Any]) -> bytes:
    body = json.dumps(answer).encode()
    head = f"HTTP/1.1 {status} Any\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
