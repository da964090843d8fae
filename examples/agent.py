"""An agent with a memory that exceeds its context window, with the official OpenAI client. agent.rs does the same.

    pip install openai
    cargo run --release                                # precis, in another terminal
    OPENAI_API_KEY=... python examples/agent.py demo   # then one line per user message
"""

import json
import os
import sys
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from openai import OpenAI

PRECIS = os.environ.get("PRECIS_URL", "http://127.0.0.1:8080")
HEADERS = {"authorization": f"Bearer {os.environ.get('PRECIS_API_KEY', 'none')}", "content-type": "application/json"}


def precis(path, body=None, allowed_error=None):
    """Return the response of precis. A problem document is returned only for the status allowed_error."""
    try:
        return json.load(urlopen(Request(PRECIS + path, body and json.dumps(body).encode(), HEADERS)))
    except HTTPError as problem:
        if problem.code != allowed_error:
            raise RuntimeError(f"{path}: {problem.code}: {problem.read().decode()}") from None
        return json.load(problem)


def execute_tool(session, call):
    """Execute a tool call and return its result message. If the tool is unknown, it contains the error."""
    response = precis(f"{session}/tools/{quote(call['function']['name'], safe='')}", call, allowed_error=404)
    return response.get("result") or {"role": "tool", "tool_call_id": call["id"], "content": response["detail"]}


def turn(model, session, text):
    """Return the agent's reply. The turn is durable when this function returns."""
    # The first request that names a user binds the session: its memory document is the one of this user.
    request = {"system_prompt": "You are a helpful assistant.", "user_message": text, "include_memory_skill": True}
    request["user_id"] = os.environ.get("PRECIS_USER", "me")
    messages, tools = precis(f"{session}/context", request)["messages"], precis("/tools")["tools"]
    before = len(messages) - 1
    while True:
        name = os.environ.get("MODEL", "gpt-5-mini")
        completion = model.chat.completions.create(model=name, messages=messages, tools=tools)
        reply = completion.choices[0].message.model_dump(exclude_none=True)
        messages.append(reply)
        if not reply.get("tool_calls"):
            break
        messages += [execute_tool(session, call) for call in reply["tool_calls"]]
    precis(f"{session}/exchanges", {"messages": messages[before:]})
    return reply.get("content") or reply.get("refusal")


if __name__ == "__main__":
    client, path = OpenAI(), f"/sessions/{quote(sys.argv[1], safe='')}"
    for line in sys.stdin:
        print(turn(client, path, line.strip()), flush=True)
