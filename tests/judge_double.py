"""A server in the place of a judge, for the tests of both judges; its answers are a plan."""

import contextlib
import http.server
import json
import threading
import time


class Double(http.server.ThreadingHTTPServer):
  """A server of the chat completions API.

  `plan(text, attempt)` decides, for the request's text and how often it came:
  a text is what the judge says, bytes are the body, a number is the status, a
  float a delay in seconds before 'Score: 5'.
  """

  daemon_threads = True
  request_queue_size = 64

  def __init__(self, plan):
    super().__init__(('127.0.0.1', 0), Handler)
    self.plan, self.lock = plan, threading.Lock()
    self.seen, self.requests = {}, []
    self.busy = self.most = 0
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
  """Yields start(plan) -> a `Double`; all of them end with the context."""
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
