"""Checks that the official clients accept bodies of requests, which are JSON lines: {"format", "body", "name"?}.

Each body is validated against the type that the client declares for it, strictly and without unknown fields. Then the client
sends it to a server on the loopback, which must receive it unchanged. The last line of the output is the number of bodies.
"""

import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic
import openai
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter

ANSWERS = {
    "/v1/chat/completions": {
        "id": "c", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}}],
    },
    "/v1/messages": {
        "id": "m", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn",
        "stop_sequence": None, "content": [{"type": "text", "text": "ok"}],
        "usage": {"input_tokens": 1, "output_tokens": 1},
    },
}  # fmt: skip

received = []


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        answer = json.dumps(ANSWERS[self.path]).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def look_at_all(value):
    """Lists are validated only where they are looked at."""
    if isinstance(value, Mapping):
        for inner in value.values():
            look_at_all(inner)
    elif isinstance(value, (Sequence, Iterator)) and not isinstance(value, (str, bytes)):
        for inner in value:
            look_at_all(inner)


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
chat = openai.OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0)
messages = anthropic.Anthropic(api_key="none", base_url=url, max_retries=0)
FORMATS = {
    "openai": (TypeAdapter(CompletionCreateParamsNonStreaming), chat.chat.completions.create),
    "anthropic": (TypeAdapter(MessageCreateParamsNonStreaming), messages.messages.create),
}


def take(format, body):
    types, send = FORMATS[format]
    look_at_all(types.validate_python(body, strict=True, extra="forbid"))
    send(**body)
    assert received.pop() == body, "another body arrived"


def refuses(format, body):
    try:
        take(format, body)
    except Exception:
        received.clear()
        return True
    return False


# A check that takes everything would be none.
wrong = [
    ("openai", {"model": "m", "messages": [{"role": "tool", "content": "x"}]}),
    ("openai", {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}),
    ("anthropic", {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}),
    ("anthropic", {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "z": 1}]}]}),
]  # fmt: skip
for format, body in wrong:
    assert refuses(format, body), f"not refused: {body}"

taken, errors = 0, []
for line in sys.stdin:
    request = json.loads(line)
    try:
        take(request["format"], request["body"])
        taken += 1
    except Exception as error:
        received.clear()
        body = json.dumps(request["body"], indent=1, ensure_ascii=False)
        errors.append(f"{request.get('name', 'generated')}, {request['format']}: {error}\n{body}")
if errors:
    sys.exit("\n\n".join(errors[:20]) + f"\n\n{len(errors)} requests were not accepted")
print(taken)
