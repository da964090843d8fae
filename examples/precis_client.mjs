// A client of precis for memory_ai_sdk.mjs, which stores messages in the chat format, for summaries and search, and
// keeps the originals of the framework in `extra`. precis_client.py does the same.

const { PRECIS_URL = "http://127.0.0.1:8080", PRECIS_API_KEY = "none" } = process.env;
const MAX_EXTRA_BYTES = 16 * 1024;

export class Session {
  constructor(id) {
    this.url = `${PRECIS_URL}/sessions/${encodeURIComponent(id)}`;
  }

  async call(method, path, body) {
    const headers = { authorization: `Bearer ${PRECIS_API_KEY}`, "content-type": "application/json" };
    const response = await fetch(this.url + path, { method, headers, body: body && JSON.stringify(body) });
    if (!response.ok) throw new Error(await response.text());
    return response.json();
  }

  // Appends a turn: pairs of an original and the messages of the chat format that it consists of.
  async append(turn) {
    const messages = turn.flatMap(([original, chat]) => {
      if (Buffer.byteLength(JSON.stringify({ original })) > MAX_EXTRA_BYTES) return chat;
      return chat.map((message, index) => ({ ...message, extra: index === 0 ? { original } : {} }));
    });
    await this.call("POST", "/exchanges", { messages });
  }

  // Returns the originals of a context. `fromChat` converts messages without one: the memory, and large messages.
  async load(fromChat) {
    const { messages, extra } = await this.call("POST", "/context", { include_extra: true });
    const extras = new Map(extra.map((item) => [item.position, item.extra]));
    const kept = messages.map((message, position) => extras.get(position) ?? { original: fromChat(message) });
    return kept.flatMap(({ original }) => original ?? []);
  }

  // Returns the originals of the whole history, for messages that have one.
  async originals() {
    const originals = [];
    for (let next = ""; next !== null; ) {
      const page = await this.call("GET", `/messages?limit=1000${next && `&cursor=${next}`}`);
      originals.push(...page.items.flatMap(({ message }) => message.extra?.original ?? []));
      next = page.next;
    }
    return originals;
  }
}
