"""Uvicorn's HTTP protocol with time limits for headers to come and answers to be read, which it does not have."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class PromptProtocol(H11Protocol):
    """Closes a connection that has no request going for longer than the limit, however slowly it sends.

    An answer that is not read within its own limit is thrown away with the connection: closing alone would hold it in
    memory until it is read.
    """

    header_seconds = 10.0
    answer_seconds = 30.0
    expiry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.arm()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self.disarm()
        super().connection_lost(exc)

    def arm(self) -> None:
        self.disarm()
        unread = self.transport.get_write_buffer_size()
        self.expiry = self.loop.call_later(self.answer_seconds if unread else self.header_seconds, self.expire)

    def disarm(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()

    def expire(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()
            return
        last: RequestResponseCycle | None = self.cycle
        going = last is not None and not last.response_complete
        if going or self.transport.is_closing():
            return
        if last is None and self.conn.trailing_data[0]:
            self.transport.write(LATE)
        self.transport.close()
