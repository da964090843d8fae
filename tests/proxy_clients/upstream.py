"""A scripted model provider, which checks each request as a strict provider would.

The last message of the user names its turn (`Turn 8: …`), and the turn decides what the answer is: see `answer`.
"""

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import tiktoken
from anthropic.types import MessageParam
from openai.types.chat import ChatCompletionMessageParam
from pydantic import TypeAdapter

SYSTEM = "You add numbers."
WINDOW = 4000
# Providers accept these fields, which their answers have and many clients return, although the types of requests lack them.
ANSWER_FIELDS = {"reasoning_content", "annotations", "extra_content"}
ENCODING = tiktoken.get_encoding("o200k_base")
TYPES = {
    "openai": TypeAdapter(list[ChatCompletionMessageParam]),
    "anthropic": TypeAdapter(list[MessageParam]),
}


def answer(turn, results):
    """Returns the thought, the text and the calls of the answer to a turn after the results of its calls so far."""
    kind = turn // 4 % 3 if turn % 4 == 0 else None
    call = {"a": turn, "b": 2}
    if kind == 0 and not results:
        return None, None, [call, {"a": turn, "b": 3}]
    if kind == 1 and not results:
        return None, "Let me add.", [call]
    if kind == 2 and len(results) < 2:
        return None, None, [{"a": turn, "b": 5 + len(results)}]
    told = f" The sums are {' and '.join(results)}." if results else ""
    thought = f"Turn {turn} is a question." if turn % 5 == 2 else None
    story = f'Zoë wrote 東京 😀 "{turn}"\n\n- and \\n {turn * 37} as the number of her ferry to the island of Ærø. '
    space = "\n" if turn % 10 == 5 else ""
    return thought, f"{space}Answer {turn}.{told} {story * 2}End of {turn}.{space}", []


def text_of(content):
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or [] if part.get("type") == "text")


def state(messages):
    """Returns the turn that is asked for, and the results of its calls so far."""
    for start, message in reversed(list(enumerate(messages))):
        if message["role"] == "user" and (turns := re.findall(r"Turn (\d+):", text_of(message["content"]))):
            break
    else:
        raise ValueError("no message of the user names a turn")
    results = []
    for message in messages[start:]:
        content = message["content"] if isinstance(message["content"], list) else []
        results += [text_of(block["content"]) for block in content if block["type"] == "tool_result"]
        results += [text_of(message["content"])] * (message["role"] == "tool")
    return int(turns[-1]), results


def look_at_all(value):
    """Lists are validated only where they are looked at."""
    if isinstance(value, Mapping):
        for inner in value.values():
            look_at_all(inner)
    elif isinstance(value, (Sequence, Iterator)) and not isinstance(value, (str, bytes)):
        for inner in value:
            look_at_all(inner)


def check(format, body):
    """Fails if a provider would refuse the request, or if it does not fit the window."""
    messages = body["messages"]
    bare = [{key: value for key, value in message.items() if key not in ANSWER_FIELDS} for message in messages]
    look_at_all(TYPES[format].validate_python(bare, strict=True, extra="forbid"))
    if format == "openai":
        systems = [message for message in messages if message["role"] == "system"]
        assert systems == messages[:1], "there is not one system message at the beginning"
        system, messages = text_of(systems[0]["content"]), messages[1:]
    else:
        system = text_of(body["system"])
        assert json.dumps(body).count('"cache_control"') <= 4, "there are more than four marks for the cache"
    assert system.startswith(SYSTEM), f"the system prompt is {system!r}"
    assert messages[0]["role"] == "user", "the first message is not one of the user"
    assert messages[-1]["role"] != "assistant", "the last message is an answer"
    calls = []
    for index, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        blocks = content if isinstance(content, list) else []
        if format == "anthropic":
            assert index % 2 == ["user", "assistant"].index(role), "the roles do not alternate"
            results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
            assert [block["type"] for block in blocks[: len(results)]] == ["tool_result"] * len(results)
            assert sorted(results) == sorted(calls), f"results of {results} after calls of {calls}"
            calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
        elif role == "tool":
            calls.remove(message["tool_call_id"])
        else:
            assert not calls, f"{calls} have no results"
            calls = [call["id"] for call in message.get("tool_calls") or []]
    assert not calls, f"{calls} have no results"
    size = tokens({key: body[key] for key in ("messages", "system", "tools") if key in body})
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    assert size + limit <= WINDOW, f"{size} + {limit} tokens do not fit"


def tokens(value):
    """Returns the tokens of all texts in a value. A template of a model adds a few for each message and block."""
    if isinstance(value, dict):
        return 2 + sum(tokens(inner) for inner in value.values())
    if isinstance(value, list):
        return sum(map(tokens, value))
    return len(ENCODING.encode(str(value), disallowed_special=())) if value else 0


def openai_answer(body, number, turn, results):
    thought, text, calls = answer(turn, results)
    message = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    if thought:
        message["reasoning_content"] = thought
    functions = [(f"call_{turn}_{call['b']}", {"name": "add", "arguments": json.dumps(call)}) for call in calls]
    if calls:
        message["tool_calls"] = [{"id": id, "type": "function", "function": function} for id, function in functions]
    finish = "tool_calls" if "tool_calls" in message else "stop"
    usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
    head = {"id": f"chatcmpl-{number}", "created": 1, "model": body["model"], "system_fingerprint": "fp_1"}
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
    deltas = [{"role": "assistant", "content": "", "refusal": None}]
    deltas += [{"reasoning_content": piece} for piece in pieces(message.get("reasoning_content"))]
    deltas += [{"content": piece} for piece in pieces(message["content"])]
    for index, call in enumerate(message.get("tool_calls", [])):
        function = call["function"]
        deltas.append({"tool_calls": [{"index": index, **call, "function": {**function, "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in pieces(function["arguments"])
        ]
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish})
    chunks = [{**head, "object": "chat.completion.chunk", "choices": [choice]} for choice in choices]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks = [{**chunk, "usage": None} for chunk in chunks]
        chunks.append({**chunks[0], "choices": [], "usage": usage})
    return [(None, json.dumps(chunk, ensure_ascii=False)) for chunk in chunks] + [(None, "[DONE]")]


def anthropic_answer(body, number, turn, results):
    thought, text, calls = answer(turn, results)
    content = [{"type": "thinking", "thinking": thought, "signature": "c2ln"}] if thought else []
    content += [{"type": "text", "text": text}] if text else []
    content += [{"type": "tool_use", "id": f"toolu_{turn}_{call['b']}", "name": "add", "input": call} for call in calls]
    stop = "tool_use" if calls else "end_turn"
    message = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": body["model"]}
    usage = {"input_tokens": 9, "output_tokens": 9}
    if not body.get("stream"):
        return {**message, "content": content, "stop_reason": stop, "stop_sequence": None, "usage": usage}
    events = [
        {
            "type": "message_start",
            "message": {**message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage},
        },
        {"type": "ping"},
    ]
    for index, block in enumerate(content):
        started, deltas = block_deltas(block)
        events.append({"type": "content_block_start", "index": index, "content_block": started})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events += [{"type": "ping"}, {"type": "content_block_stop", "index": index}]
    events.append(
        {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": {"output_tokens": 9}}
    )
    events.append({"type": "message_stop"})
    return [(event["type"], json.dumps(event, ensure_ascii=False)) for event in events]


def block_deltas(block):
    """Returns the beginning of a block, and the parts that complete it."""
    kind = block["type"]
    if kind == "tool_use":
        parts = ["", *pieces(json.dumps(block["input"]))]
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": part} for part in parts]
    deltas = [{"type": f"{kind}_delta", kind: part} for part in pieces(block[kind])]
    if kind == "text":
        return {**block, "text": ""}, deltas
    return {**block, "thinking": "", "signature": ""}, [*deltas, {"type": "signature_delta", "signature": block["signature"]}]


def pieces(text):
    return re.findall(r"(?s).{1,9}", text or "")


class Upstream:
    """A running provider. `sent` has the bytes of each answer, `errors` what was wrong with a request."""

    def __init__(self):
        self.sent, self.errors = [], []
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                upstream.reply(self, body)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}/v1"

    def reply(self, handler, body):
        format = {"/v1/chat/completions": "openai", "/v1/messages": "anthropic"}[handler.path.split("?")[0]]
        number = len(self.sent)
        self.sent.append(None)
        status, kind = 200, "application/json"
        try:
            check(format, body)
            made = {"openai": openai_answer, "anthropic": anthropic_answer}[format](body, number, *state(body["messages"]))
        except Exception as error:
            self.errors.append(f"request {number}: {type(error).__name__}: {error}\n{json.dumps(body, ensure_ascii=False)}")
            status, made = 400, {"error": {"type": "invalid_request_error", "message": str(error)[:500]}}
        if isinstance(made, list):
            kind = "text/event-stream; charset=utf-8"
            made = "".join((f"event: {name}\n" if name else "") + f"data: {data}\n\n" for name, data in made).encode()
        else:
            # Providers are not alike in their white space.
            made = json.dumps(made, ensure_ascii=False, indent=number % 2 or None).encode()
        self.sent[number] = made
        handler.send_response(status)
        handler.send_header("content-type", kind)
        handler.send_header("x-upstream-call", str(number))
        if kind.startswith("application"):
            handler.send_header("content-length", str(len(made)))
            handler.end_headers()
            handler.wfile.write(made)
            return
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        # The parts cut events and characters.
        for start in range(0, len(made), 173):
            part = made[start : start + 173]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            handler.wfile.flush()
        handler.wfile.write(b"0\r\n\r\n")
