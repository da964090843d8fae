"""precis as a session of the OpenAI Agents SDK: Runner.run(agent, text, session=PrecisSession("demo"))."""

from asyncio import to_thread
from itertools import groupby

from agents.models.chatcmpl_converter import Converter

from precis_client import Session


def from_chat(message):
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    calls = message.get("tool_calls", [])
    calls = [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
    return [{"role": message["role"], "content": message["content"]}, *calls] if message["content"] else calls


class PrecisSession:
    def __init__(self, session_id):
        self.session_id, self.session_settings, self.session = session_id, None, Session(session_id)

    async def get_items(self, limit=None):
        items = sum(await to_thread(self.session.load, from_chat), [])
        return items[-limit:] if limit else items

    async def add_items(self, items):
        # A reply and its tool calls are one message. Each user message and each result is another one.
        groups = groupby(items, lambda item: id(item) if item.get("role") == "user" or "output" in item else None)
        groups = [list(group) for _, group in groups]
        await to_thread(self.session.append, [(group, Converter.items_to_messages(group)) for group in groups])

    async def pop_item(self):
        *rest, item = await to_thread(self.session.pop, from_chat) or [None]
        if rest:
            await PrecisSession.add_items(self, rest)
        return item

    async def clear_session(self):
        await to_thread(self.session.call, "DELETE")
