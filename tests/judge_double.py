"""A server that stands in for a judge in the tests of both judge rewards; `plan` decides its answers."""

import contextlib
import http.server
import json
import threading
import time


class Double(http.server.ThreadingHTTPServer):
  """A server of the chat completions API.

  `plan(text, attempt)` decides how to answer, given the text of the request and how often that text has come:
  a str is the judge's message, bytes are the whole body, an int is the HTTP status, and a float is a delay in seconds
  before the message 'Score: 5'.
  """

  daemon_threads = True
  request_queue_size = 64

  def __init__(self, plan):
    super().__init__(('127.0.0.1', 0), Handler)
    self.plan, self.lock = plan, threading.Lock()
    self.seen, self.requests = {}, []
    self.busy = self.most = 0  # requests in progress now, and the largest number at one time
    self.url = f'http://127.0.0.1:{self.server_port}/v1'
    threading.Thread(target=self.serve_forever, args=(0.05,)).start()


class Handler(http.server.BaseHTTPRequestHandler):
  def do_POST(self):
    size = int(self.headers['Content-Length'])
    body, double = json.loads(self.rfile.read(size)), self.server
    text = body['messages'][0]['content']
    with double.lock:
      attempt = double.seen[text] = double.seen.get(text, 0) + 1
      double.requests.append((self.path, dict(self.headers), body))
      double.busy += 1
      double.most = max(double.most, double.busy)
    answer = double.plan(text, attempt)
    if isinstance(answer, float):
      time.sleep(answer)
      answer = 'Score: 5'
    with double.lock:
      double.busy -= 1
    status = answer if isinstance(answer, int) else 200
    if isinstance(answer, str):
      answer = json.dumps({'choices': [{'message': {'role': 'assistant', 'content': answer}}]}).encode()
    elif isinstance(answer, int):
      answer = b'{"error": "told to fail"}'
    try:
      self.send_response(status)
      self.send_header('Content-Length', str(len(answer)))
      if status == 302:
        self.send_header('Location', 'http://127.0.0.1:9/')
      if status == 429:
        self.send_header('Retry-After', '1')
      self.end_headers()
      self.wfile.write(answer)
    except ConnectionError:
      pass  # the client has given up

  def log_message(self, *unused):
    pass


@contextlib.contextmanager
def doubles():
  """Yields start(plan) -> Double; all servers that were started end with the context."""
  started = []

  def start(plan):
    started.append(Double(plan))
    return started[-1]

  try:
    yield start
  finally:
    for server in started:
      server.shutdown()
      server.server_close()
