"""A server that streams chat events and does as little else as it can, so that the booster's cost shows beside it.

Run as a process; it prints its port. A request says how many ``events`` it wants and at which ``rate`` a second (0: as
fast as they go). Each event carries the monotonic time, in nanoseconds, at which it was handed to the socket.
"""

import asyncio
import json
import time

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: close\r\n\r\n"
)
BEFORE = b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1,"model":"m","sent":'
AFTER = (
    b',"choices":[{"index":0,"delta":{"content":"three or four tokens "},"logprobs":null,"finish_reason":null}]}\n\n'
)
LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def frame(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        wish = json.loads(await reader.readexactly(length))
        writer.write(HEAD)
        await _send_events(writer, wish["events"], wish["rate"])
        writer.write(frame(LAST) + b"0\r\n\r\n")
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _send_events(writer: asyncio.StreamWriter, events: int, rate: float) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    for number in range(events):
        if writer.is_closing():
            return
        if rate:
            await asyncio.sleep(start + number / rate - loop.time())
        writer.write(frame(BEFORE + b"%019d" % time.monotonic_ns() + AFTER))
        # Draining after each event would make an unpaced source slower than what is behind it.
        if rate or number % 16 == 0:
            await writer.drain()


async def main() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
