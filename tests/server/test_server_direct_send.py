"""DirectSend: messages keep their order, whatever the transport does."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from s2moe.server.direct_send import DirectSend


class Transport:
    """An ASGI `send` that waits while it is paused, as uvicorn's does, and then takes the message."""

    def __init__(self) -> None:
        self.taken: list[object] = []
        self.writable = asyncio.Event()
        self.writable.set()
        self.error: Exception | None = None

    async def send(self, message: Message) -> None:
        if self.error is not None:
            raise self.error
        await self.writable.wait()
        await self.writable.wait()  # a second suspension must be seen through, too
        self.taken.append(message["n"])


def message(n: int) -> Message:
    return {"type": "http.response.body", "n": n}


async def test_is_done_on_return_while_nothing_waits() -> None:
    transport = Transport()
    direct = DirectSend(transport.send)
    for n in range(3):
        assert direct.is_free
        direct(message(n))
        assert transport.taken == list(range(n + 1))
    await direct.settled()


async def test_takes_nothing_more_until_the_transport_took_what_it_has() -> None:
    transport = Transport()
    direct = DirectSend(transport.send)
    transport.writable.clear()
    direct(message(0))
    assert not direct.is_free
    assert transport.taken == []
    transport.writable.set()
    await direct.settled()
    assert transport.taken == [0]
    assert direct.is_free
    direct(message(1))
    assert transport.taken == [0, 1]


async def test_error_of_the_transport_reaches_who_settles_not_who_sends() -> None:
    transport = Transport()
    transport.error = OSError("gone")
    direct = DirectSend(transport.send)
    direct(message(0))
    assert not direct.is_free
    with pytest.raises(OSError, match="gone"):
        await direct.settled()


async def test_close_gives_up_what_waits() -> None:
    transport = Transport()
    direct = DirectSend(transport.send)
    transport.writable.clear()
    direct(message(0))
    direct.close()
    with pytest.raises(asyncio.CancelledError):
        await direct.settled()
    assert transport.taken == []
