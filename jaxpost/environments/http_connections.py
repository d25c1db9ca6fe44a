"""HTTP/1.1 connections of the server: one thread moves the bytes of all clients, h11 reads and writes the protocol.

An open connection costs a socket and its buffers, and no thread, so that 1,000 clients can wait for answers at the same
time. A request has to be complete within `PATIENCE_S`, and a client that leaves ends its `Call`.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import email.utils
import http
import logging
import resource
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import h11

MAX_BODY = 1 << 24  # bytes of a request
PATIENCE_S = 60.0  # time for a request to be complete, for the next one to begin, and for an answer to be read
_MAX_HEAD = 1 << 15  # bytes of the request line and the headers
_MAX_BODIES = 1 << 28  # bytes of all requests at a time
_BACKLOG = 1024  # connections that wait to be accepted; the system resets those beyond
_PART = 1 << 14  # bytes read at once; a head may exceed `_MAX_HEAD` by as much
_LINGER_S = 2.0  # how long to read from a refused client that may still be sending
_END_S = 5.0  # time to send answers that are ready when the server ends
EVENTS = 'text/event-stream'  # content type of a reply that may be sent in parts


class Reply(NamedTuple):
  """A response: status, text, and its content type."""

  status: int
  text: str
  kind: str = 'application/json'


class HttpError(Exception):
  """A request is refused with this status, and with this `code` in the API's error.

  Raised before the request is read to its end, it ends the connection.
  """

  def __init__(self, status: int, message: str, code: str | None = None) -> None:
    super().__init__(message)
    self.status = status
    self.code = code


@dataclasses.dataclass(eq=False)
class Call:
  """A request that is being answered."""

  method: str
  path: str
  headers: dict[str, str]  # {name in lower case: value}
  # Sends events of a stream, before the reply with the last of them; raises ConnectionError or TimeoutError if the
  # client does not read them.
  send_event: Callable[[str], Awaitable[None]]
  body: bytes = b''
  client_left: bool = False  # True once the client has closed the connection
  # Futures that the answer waits for; they are cancelled when the client leaves.
  futures: list[concurrent.futures.Future] = dataclasses.field(default_factory=list)

  def leave(self) -> None:
    """Marks that the client has left, and cancels its answer."""
    self.client_left = True
    self.cancel()

  def cancel(self) -> None:
    """Cancels the futures that the answer waits for."""
    for future in self.futures:
      future.cancel()


def listen(host: str, port: int) -> socket.socket:
  """Returns a listening socket; OSError if the address cannot be used."""
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def raise_file_limit() -> None:
  """Raises this process's limit of open files, often 1,024, to the most that the system allows: a socket is a file."""
  hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
  resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Connections:
  """All connections of a server, in a thread of their own, which runs from the start until `close`.

  Attributes:
    held: bytes of all requests that are being read or answered.
    ending: set once `close` was called.

  Args:
    listening: see `listen`.
    answer: makes the reply to a call; runs in the thread of the connections and must not block it.
    refusal: (status, message) -> the reply to a request that is refused before it is read to its end.
    admit: called with the headers of a request before its body is read; may raise HttpError.
  """

  def __init__(
    self,
    listening: socket.socket,
    answer: Callable[[Call], Awaitable[Reply]],
    refusal: Callable[[int, str], Reply],
    admit: Callable[[Call], None],
  ) -> None:
    self.answer = answer
    self.admit = admit
    self.refusal = refusal
    self.port = listening.getsockname()[1]
    self.held = 0
    self.ending = asyncio.Event()
    self._listening = listening
    self._open: dict[asyncio.Task, _Connection] = {}
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
    self._thread.start()

  def close(self) -> None:
    """Stops listening, sends the answers that are ready within a few seconds, and ends all connections."""
    if self._thread.is_alive():
      self._loop.call_soon_threadsafe(self.ending.set)
      self._thread.join()
    self._loop.close()

  async def _serve(self) -> None:
    server = await asyncio.start_server(self._accepted, sock=self._listening, limit=_PART, backlog=_BACKLOG)
    await self.ending.wait()
    server.close()
    answering = [task for task, connection in self._open.items() if connection.answering]
    if answering:
      await asyncio.wait(answering, timeout=_END_S)
    for task in list(self._open):
      task.cancel()
    while self._open:
      await asyncio.wait(list(self._open))

  async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    task = asyncio.current_task()
    assert task
    connection = self._open[task] = _Connection(self, reader, writer)
    try:
      await connection.serve()
    except (ConnectionError, TimeoutError) as error:
      logging.info('a client was gone before its answer: %s', type(error).__name__)
    finally:
      del self._open[task]
      writer.transport.abort()


class _Connection:
  """One connection: its requests one after another."""

  def __init__(self, owner: Connections, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    self.answering = False
    self._owner = owner
    self._reader = reader
    self._writer = writer
    writer.transport.set_write_buffer_limits(0)  # `drain` waits until all is written.
    self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD)
    self._held = 0
    self._bodiless = False  # the request may be answered by headers alone
    self._streaming = False  # a part of the reply was sent

  async def serve(self) -> None:
    """Answers requests until either side ends the connection."""
    try:
      while await self._exchange():
        self._protocol.start_next_cycle()
      if self._protocol.their_state not in (h11.DONE, h11.CLOSED):
        await self._linger()
    finally:
      self._hold(-self._held)

  async def _exchange(self) -> bool:
    """Reads a request and sends the reply; False if the connection ends with it."""
    try:
      async with asyncio.timeout(PATIENCE_S):
        call = await self._read()
    except TimeoutError:
      return False
    except h11.RemoteProtocolError as error:
      status, message = error.error_status_hint, str(error)
      if status == 431 and b'\n' not in self._protocol.trailing_data[0]:
        status, message = 414, f'the address has more than {_MAX_HEAD} bytes'
      await self._send(self._owner.refusal(status, message))
      return False
    except HttpError as error:
      await self._send(self._owner.refusal(error.status, str(error)))
      return False
    if call is None:
      return False
    self.answering = True
    reply = await self._answer(call)
    if call.client_left:
      return False
    await self._send(reply)
    self.answering = False
    self._hold(-self._held)
    return self._protocol.our_state is h11.DONE and not self._owner.ending.is_set()

  async def _read(self) -> Call | None:
    """Returns the next request; None if the client has closed the connection instead."""
    event = await self._next()
    if not isinstance(event, h11.Request):  # the end of the connection
      return None
    self._bodiless = event.method == b'HEAD'
    headers = {name.decode('latin-1'): value.decode('latin-1') for name, value in event.headers}
    path = event.target.decode('ascii').partition('?')[0]  # no call takes parameters in its address
    call = Call(event.method.decode('ascii'), path, headers, self._send_event)
    self._owner.admit(call)
    if call.method not in ('GET', 'POST'):
      raise HttpError(501, f'the method {call.method} is not supported')
    size = headers.get('content-length', '0' if call.method == 'GET' else '')
    if 'transfer-encoding' in headers or not size:
      raise HttpError(411, 'a request needs a Content-Length, in bytes')
    if int(size) > MAX_BODY:
      raise HttpError(413, f'the body has more than {MAX_BODY} bytes')
    body = bytearray()
    while isinstance(event := await self._next(), h11.Data):
      self._hold(len(event.data))  # not Content-Length: a client that never sends its body would block others
      if self._owner.held > _MAX_BODIES:
        raise HttpError(503, f'the server holds requests of more than {_MAX_BODIES} bytes; try again later')
      body += event.data
    call.body = bytes(body)
    return call

  async def _next(self) -> object:
    """Returns the next `h11.Event`: a request, a part or the end of its body, or the end of the connection."""
    while (event := self._protocol.next_event()) is h11.NEED_DATA:
      if self._protocol.they_are_waiting_for_100_continue:
        self._write(h11.InformationalResponse(status_code=100, headers=[]))
      self._protocol.receive_data(await self._reader.read(_PART))
    return event

  async def _answer(self, call: Call) -> Reply:
    """Returns the reply; if the client leaves, that cancels the call."""
    answer = asyncio.ensure_future(self._owner.answer(call))
    try:
      while not answer.done() and not call.client_left and len(self._protocol.trailing_data[0]) < _PART:
        received = asyncio.ensure_future(self._reader.read(_PART))
        await asyncio.wait({answer, received}, return_when=asyncio.FIRST_COMPLETED)
        if not received.done():
          received.cancel()
          await asyncio.wait({received})  # Only one may read at a time.
        elif received.exception() or not received.result():
          call.leave()
        else:  # the next request, sent early
          self._protocol.receive_data(received.result())
      return await answer  # also of a call that has been left: it may hold the session of an agent
    except asyncio.CancelledError:
      call.leave()
      raise

  async def _send(self, reply: Reply) -> None:
    """Sends a reply, or the end of a stream of events; TimeoutError if the client does not read it."""
    if self._streaming:
      text = reply.text if reply.kind == EVENTS else f'data: {reply.text}\n\n'  # JSON of an error becomes an event
      self._write(h11.Data(data=text.encode()))
    else:
      data = reply.text.encode()
      self._write_head(reply.status, reply.kind, ('Content-Length', str(len(data))))
      if not self._bodiless:
        self._write(h11.Data(data=data))
    self._write(h11.EndOfMessage())
    self._streaming = False
    async with asyncio.timeout(PATIENCE_S):
      await self._writer.drain()

  async def _send_event(self, text: str) -> None:
    """Sends events of a reply that has no known length; the first call sends the headers."""
    if not self._streaming:
      self._write_head(200, EVENTS, ('Cache-Control', 'no-cache'))
      self._streaming = True
    self._write(h11.Data(data=text.encode()))
    async with asyncio.timeout(PATIENCE_S):
      await self._writer.drain()

  def _write_head(self, status: int, kind: str, header: tuple[str, str]) -> None:
    headers = [('Date', email.utils.formatdate(usegmt=True)), ('Content-Type', kind), header]
    if self._protocol.their_state is not h11.DONE:  # the request was not read to its end
      headers.append(('Connection', 'close'))
    self._write(h11.Response(status_code=status, headers=headers, reason=http.HTTPStatus(status).phrase))

  def _write(self, event: h11.Event) -> None:
    self._writer.write(self._protocol.send(event) or b'')

  async def _linger(self) -> None:
    """Reads and drops input for a moment: closing a socket with unread bytes resets it, and the answer is lost."""
    self._writer.write_eof()
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(_LINGER_S):
        while await self._reader.read(_PART):
          pass

  def _hold(self, size: int) -> None:
    self._held += size
    self._owner.held += size
