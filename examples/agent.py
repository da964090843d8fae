"""An agent whose memory outlasts its context window, with the official OpenAI client: the same as agent.rs.

    pip install openai
    cargo run --release                                # precis, in another terminal
    OPENAI_API_KEY=... python examples/agent.py demo   # then a line for each thing to say
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


def precis(path, body=None, may_be=None):
    """What precis answers; or the problem, if it is of this status."""
    try:
        return json.load(urlopen(Request(PRECIS + path, body and json.dumps(body).encode(), HEADERS)))
    except HTTPError as problem:
        if problem.code != may_be:
            raise RuntimeError(f"{path}: {problem.code}: {problem.read().decode()}") from None
        return json.load(problem)


def tool(session, call):
    """What goes back to the model for its call; where there is no such tool, that."""
    answer = precis(f"{session}/tools/{quote(call['function']['name'], safe='')}", call, may_be=404)
    return answer.get("result") or {"role": "tool", "tool_call_id": call["id"], "content": answer["detail"]}


def turn(model, session, text):
    """What the agent replies. When this returns, the turn is durable."""
    asked = {"system_prompt": "You are a helpful assistant.", "user_message": text, "include_memory_skill": True}
    messages, tools = precis(f"{session}/context", asked)["messages"], precis("/tools")["tools"]
    before = len(messages) - 1
    while True:
        name = os.environ.get("MODEL", "gpt-5-mini")
        answer = model.chat.completions.create(model=name, messages=messages, tools=tools)
        reply = answer.choices[0].message.model_dump(exclude_none=True)
        messages.append(reply)
        if not reply.get("tool_calls"):
            break
        messages += [tool(session, call) for call in reply["tool_calls"]]
    precis(f"{session}/exchanges", {"messages": messages[before:]})
    return reply.get("content") or reply.get("refusal")


if __name__ == "__main__":
    client, path = OpenAI(), f"/sessions/{quote(sys.argv[1], safe='')}"
    for line in sys.stdin:
        print(turn(client, path, line.strip()), flush=True)
