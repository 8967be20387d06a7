"""A small OpenAI-compatible server for tests: what it replies is a function of the request."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(reply, noted=lambda request, body: body):
    """`reply(number of the request, body)` gives a message, or (status, headers, raw text). Yields the URL and what
    `noted(request, body)` keeps of each request."""
    seen, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                seen.append(noted(self, body))
                number = len(seen)
            found = reply(number, body)
            status, headers, raw = found if isinstance(found, tuple) else (200, {}, json.dumps(completion(found)))
            try:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw.encode())
            except OSError:  # the client has given up
                pass

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1", seen
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def completion(message, finish="stop", used=(100, 10)):
    """A chat completion."""
    usage = {"prompt_tokens": used[0], "completion_tokens": used[1]}
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}


def call(code, number=1):
    """A message that calls the tool."""
    arguments = code if isinstance(code, str) and code.startswith("!") else json.dumps({"code": code})
    function = {"name": "python", "arguments": arguments.removeprefix("!")}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}],
    }


def say(text):
    """A message that is an answer."""
    return {"role": "assistant", "content": text}
