"""A client of precis for the adapters next to it. They store messages in the chat format, for summaries and search, and
keep the originals of the framework in `extra`."""

import json
import os

import requests

URL = os.environ.get("PRECIS_URL", "http://127.0.0.1:8080")
HEADERS = {"authorization": f"Bearer {os.environ.get('PRECIS_API_KEY', 'none')}"}
MAX_EXTRA_BYTES = 16 * 1024


class Session:
    def __init__(self, session_id):
        self.url = f"{URL}/sessions/{requests.utils.quote(session_id, safe='')}"

    def call(self, method, path="", body=None):
        response = requests.request(method, self.url + path, json=body, headers=HEADERS)
        if response.status_code == 404 and "session-not-found" in response.text:
            return None  # a session has no state before its first message
        response.raise_for_status()
        return response.json() if response.content else None

    def append(self, turn):
        """Appends a turn: pairs of an original and the messages of the chat format that it consists of."""
        messages = []
        for original, (first, *others) in turn:
            if len(json.dumps(original)) < MAX_EXTRA_BYTES - 32:
                first = {**first, "extra": {"original": original}}
                others = [{**other, "extra": {}} for other in others]
            messages += [first, *others]
        self.call("POST", "/exchanges", {"messages": messages})

    def load(self, from_chat):
        """Returns the originals of a context. `from_chat` converts messages without one: the memory, large messages."""
        context = self.call("POST", "/context", {"include_extra": True})
        extras = {item["position"]: item["extra"] for item in context["extra"]}
        kept = [extras.get(i, {"original": from_chat(m)}) for i, m in enumerate(context["messages"])]
        return [extra["original"] for extra in kept if extra]

    def history(self, query=""):
        """Yields the items of the history."""
        next = ""
        while next is not None:
            page = self.call("GET", f"/messages?limit=100{query}{next and '&cursor='}{next}") or {"items": [], "next": None}
            yield from page["items"]
            next = page["next"]

    def originals(self):
        """Returns the originals of the whole history, for messages that have one."""
        extras = [item["message"].get("extra") for item in self.history()]
        return [extra["original"] for extra in extras if extra]

    def pop(self, from_chat):
        """Removes the last original by a rewind, which keeps it in a branch, and returns it; None if there is none."""
        for item in self.history("&order=desc"):
            extra = item["message"].get("extra")
            if extra != {}:  # the first message of the original
                self.call("DELETE", f"/messages?after={item['seq'] - 1}")
                if original := extra["original"] if extra else from_chat(item["message"]):
                    return original
        return None
