"""Runs a client of model providers through the proxy of precis, and checks what arrives on both sides and what is stored.

    python check.py CLIENT TURNS

Prints the base URL for the upstream of precis, then reads the URL of precis. See tests/proxy_clients.rs.
"""

import contextlib
import http.client
import io
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

from upstream import Upstream, answer, text_of

HERE = Path(__file__).parent
SESSION = "clients"


class Tap:
    """Passes bytes between a client and precis unchanged, and keeps those of precis by connection.

    `loses`: every seventh response is lost with its connection.
    """

    def __init__(self, url, loses):
        host, port = url.removeprefix("http://").split(":")
        self.target, self.streams = (host, int(port)), []
        self.loses, self.requests, self.lost = loses, 0, 0
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=self.accept, args=[listener], daemon=True).start()

    def accept(self, listener):
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(self.target)
            kept = bytearray()
            self.streams.append(kept)
            for ends in [(client, server, None), (server, client, kept)]:
                threading.Thread(target=self.pump, args=ends, daemon=True).start()

    def pump(self, source, target, kept):
        try:
            while part := source.recv(65536):
                if kept is None:
                    self.requests += part.startswith(b"POST ")
                elif self.loses and self.requests % 7 == 3:
                    self.lost += 1
                    break
                else:
                    kept += part
                target.sendall(part)
        except OSError:
            pass  # The other side has closed the connection.
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def responses(self):
        """Returns the headers and the body of each response."""
        for kept in self.streams:
            data = Recorded(bytes(kept))
            while data.tell() < len(kept):
                response = http.client.HTTPResponse(data)
                response.begin()
                yield response.headers, response.read()


class Recorded(io.BytesIO):
    """A socket for HTTPResponse, which does not end with one response."""

    def makefile(self, _):
        return self

    def close(self):
        pass


def question(turn):
    return f"Turn {turn}: what is {turn} plus 2? {'The ferry leaves at nine, my hotel is near the harbour. ' * 3}Ask {turn}"


def expected(turns):
    """Returns the conversation as role, text, and calls or results of tools."""
    for turn in range(1, turns + 1):
        yield "user", question(turn), []
        results = []
        while True:
            _, text, calls = answer(turn, results)
            yield "assistant", text or "", calls
            if not calls:
                break
            results += [str(call["a"] + call["b"]) for call in calls]
            yield from (("tool", str(call["a"] + call["b"]), []) for call in calls)


def plain(message):
    """Yields a stored message of either protocol in the form of `expected`."""
    role, content = message["role"], message.get("content")
    if role == "assistant":
        calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        if isinstance(content, list):
            calls += [block["input"] for block in content if block["type"] == "tool_use"]
        yield role, text_of(content), calls
        return
    for block in content if isinstance(content, list) else []:
        if block["type"] == "tool_result":
            yield "tool", text_of(block["content"]), []
    if text := text_of(content):
        yield role, text, []


def get(url):
    with urllib.request.urlopen(url) as response:
        return json.load(response)


def stored(url):
    page = get(f"{url}/sessions/{SESSION}/messages?limit=1000")
    assert page.get("next") is None, "the messages have more than one page"
    return [item["message"] for item in page["items"]]


def run(client, url, turns):
    """Runs a client to its end. It gets the questions, each with the answer to whether it is streamed."""
    program = [sys.executable, HERE / "clients.py"]
    if client.startswith("node-"):
        program = ["node", HERE / "clients.mjs"]
    elif client.startswith("litellm-"):
        program[0] = os.environ["PRECIS_PROXY_CLIENTS_LITELLM"]
    questions = [(question(turn), (turn // 4 + turn) % 2 == 1) for turn in range(1, turns + 1)]
    environment = {**os.environ, "PRECIS_PROXY_CLIENTS_QUESTIONS": json.dumps(questions)}
    # Otherwise LiteLLM downloads the prices of models.
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    command = [*program, client, url, SESSION]
    subprocess.run(command, check=True, timeout=600, stdin=subprocess.DEVNULL, env=environment)


def main():
    client, turns = sys.argv[1], int(sys.argv[2])
    upstream = Upstream()
    print(upstream.url, flush=True)
    url = sys.stdin.readline().strip()
    tap = Tap(url, client.endswith("-lossy"))
    failures = []
    try:
        run(client, tap.url, turns)
    except subprocess.SubprocessError as error:
        failures.append(str(error))
    failures += upstream.errors
    received, summarised = 0, False
    for headers, body in tap.responses():
        number = headers["x-upstream-call"]
        if number is None:
            failures.append(f"not of the upstream: {headers.items()} {body[:500]}")
            continue
        received += 1
        if body != upstream.sent[int(number)]:
            failures.append(f"response {number} has other bytes than that of the upstream")
        coverage, memory = headers["x-precis-coverage"] or "", headers["x-precis-memory"]
        summarised |= coverage.startswith("summary=1-")
        if not coverage.endswith("omitted=none") or memory or headers["x-precis-session"] != SESSION:
            failures.append(f"response {number}: {headers.items()}")
    if not summarised:
        failures.append("the conversation fits the window")
    calls = sum(role == "assistant" for role, *_ in expected(turns))
    if received != calls or len(upstream.sent) != calls + tap.lost:
        failures.append(f"{len(upstream.sent)} calls of the upstream, {received} + {tap.lost} responses, not {calls}")
    conversation = [part for message in stored(url) for part in plain(message)]
    for index, (is_there, wanted) in enumerate(zip(conversation, expected(turns))):
        if is_there != wanted:
            failures.append(f"stored message {index + 1} is {is_there}\ninstead of {wanted}")
            break
    if len(conversation) != (count := len(list(expected(turns)))):
        failures.append(f"{len(conversation)} messages are stored, not {count}")
    if branches := get(f"{url}/sessions?forked_from={SESSION}")["items"]:
        failures.append(f"{len(branches)} branches, the first of {branches[0]}")
    if failures:
        sys.exit("\n\n".join(failures[:5]) + f"\n\n{client}: {len(failures)} failures")

main()
