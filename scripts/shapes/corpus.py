"""Writes the files of the corpus of message shapes, and plays the model provider for the packages that build them.

A shape is one JSON file in tests/shapes: the messages of one exchange as an application sends them, the package and the
version that built them, and what precis does with them. tests/shapes.rs describes the fields.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "shapes"

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PDF = "JVBERi0xLjQKMSAwIG9iago8PC9UeXBlL0NhdGFsb2c+PgplbmRvYmoKdHJhaWxlcgo8PC9Sb290IDEgMCBSPj4KJSVFT0YK"
WAV = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAgD4AAAB9AAACABAAZGF0YQAAAAA="


def plain(value):
    """Returns the value as JSON holds it. Objects that have a dump are dumped as they do by default."""
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json"))
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def write(name, package, produced, messages, *, format="openai", finds=(), hides=(), rejects=None, version=None):
    """Writes a shape. A rejected one names the field and words of the error.

    `finds` are searched, and `hides` are texts that no context has by default, such as reasoning.
    """
    version = version or metadata.version(package)
    head = {"package": package, "version": version, "produced": produced, "format": format}
    if rejects:
        assert not finds and not hides, name
        head["rejects"] = {"field": rejects[0], "words": list(rejects[1:])}
    else:
        head["finds"], head["hides"] = list(finds), list(hides)
    texts = json.dumps(plain(messages), ensure_ascii=False)
    for text in [*finds, *hides]:
        assert json.dumps(text, ensure_ascii=False)[1:-1] in texts or text in texts, f"{name}: no {text!r}"
    lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}," for key, value in head.items()]
    # One line per message, without white space: the bytes that a client sends.
    compact = [json.dumps(plain(message), ensure_ascii=False, separators=(",", ":")) for message in messages]
    lines += ['  "messages": [', ",\n".join(f"    {message}" for message in compact), "  ]"]
    path = FOLDER / f"{name}.json"
    assert not path.exists(), f"{name} exists already"
    path.write_text("{\n" + "\n".join(lines) + "\n}\n", encoding="utf-8")


class Provider:
    """A server on the loopback that returns the bodies of `replies` one after another and records the requests."""

    def __init__(self):
        self.replies, self.requests = [], []
        provider = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                provider.requests.append(json.loads(body))
                reply = provider.replies.pop(0)
                kind = "text/event-stream" if isinstance(reply, str) else "application/json"
                data = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"

    def sent(self):
        """Returns the messages of the last request, and forgets all requests."""
        messages = self.requests[-1]["messages"]
        self.requests.clear()
        assert not self.replies, "a reply was not fetched"
        return messages


def completion(message, finish="stop"):
    """Returns the body of a chat completion."""
    choice = {"index": 0, "finish_reason": finish, "logprobs": None, "message": {"role": "assistant", **message}}
    usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1760000000, "model": "m",
            "choices": [choice], "usage": usage}  # fmt: skip


def call(id, name, arguments):
    """Returns a tool call of a chat completion."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def anthropic_message(content, stop="end_turn"):
    """Returns the body of an answer of the messages API."""
    return {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": content,
            "stop_reason": stop, "stop_sequence": None, "usage": {"input_tokens": 9, "output_tokens": 9}}  # fmt: skip


def response(output):
    """Returns the body of an answer of the Responses API."""
    return {"id": "resp_1", "object": "response", "created_at": 1760000000, "model": "m", "status": "completed",
            "output": output, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None,
            "incomplete_details": None, "instructions": None, "metadata": {}, "temperature": 1.0, "top_p": 1.0,
            "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                      "output_tokens": 9, "output_tokens_details": {"reasoning_tokens": 0},
                      "total_tokens": 18}}  # fmt: skip


if __name__ == "__main__":
    # Shapes from programs in other languages, one per line.
    for line in sys.stdin:
        write(**json.loads(line))
