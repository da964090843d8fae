// Calls of the API, and the sessions that the tests show.

import assert from "node:assert/strict";

export class Service {
  constructor(url, key) {
    Object.assign(this, { url, key });
  }

  async call(method, path, body) {
    const headers = { "content-type": "application/json" };
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    const response = await fetch(`${this.url}${path}`, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
    const text = await response.text();
    assert.ok(response.ok, `${method} ${path}: ${response.status} ${text}`);
    return text === "" ? null : JSON.parse(text);
  }

  get = (path) => this.call("GET", path);
  post = (path, body) => this.call("POST", path, body);
  put = (path, body) => this.call("PUT", path, body);

  session = (id) => `/sessions/${encodeURIComponent(id)}`;

  append = (id, messages, more = {}) => this.post(`${this.session(id)}/exchanges`, { messages, ...more });
  consolidate = (id) => this.post(`${this.session(id)}/consolidations`);
}

const TOPICS = ["harbour", "ferry", "kiln", "studio", "garden", "ledger", "violin", "archive"];

/** Returns messages of a conversation, questions and answers alternately; the first has this number. */
export function conversation(first, length) {
  return Array.from({ length }, (_, index) => {
    const seq = first + index;
    const topic = TOPICS[seq % TOPICS.length];
    return seq % 2 === 1
      ? { role: "user", content: `Question ${seq}: what did we decide about the ${topic}, and who pays for it?` }
      : { role: "assistant", content: `Answer ${seq}: the ${topic} opens on day ${seq}. Ada pays ${seq} euros, and Miko keeps the key.` };
  });
}

export const call = (id, name, input) => ({ id, type: "function", function: { name, arguments: JSON.stringify(input) } });

/** Records a session of 5,000 messages with a redacted message, five revisions, and a call without a result at the end. */
export async function recordLargeSession(service, id) {
  const append = (first, length) => service.append(id, conversation(first, length), { user_id: "ada" });
  for (let seq = 1; seq <= 4900; seq += 100) {
    await append(seq, 100);
    if (seq === 201) await service.call("DELETE", `${service.session(id)}/messages/150`);
    if (seq % 1000 === 901) await service.consolidate(id);
  }
  await append(4901, 98);
  await service.consolidate(id);
  const question = { role: "user", content: "Please look up when the last ferry leaves." };
  const looksUp = { role: "assistant", content: null, tool_calls: [call("call_ferry", "timetable", { line: "ferry" })] };
  await service.append(id, [question, looksUp]);
}

/** Records 144 messages, of which message 123 is a long result of a tool. Returns the first 100 summarised, if a model answers. */
export async function recordLongResult(service, id) {
  await service.append(id, conversation(1, 120));
  await service.consolidate(id).catch(() => {});
  const departures = Array.from({ length: 3000 }, (_, line) => `Line ${line} leaves from pier ${line % 7}.`).join("\n");
  await service.append(id, [
    { role: "user", content: "Which lines leave from pier 3?" },
    { role: "assistant", content: null, tool_calls: [call("call_departures", "departures", { pier: 3 })] },
    { role: "tool", tool_call_id: "call_departures", content: departures },
    { role: "assistant", content: "Every seventh line, beginning with line 3." },
    ...conversation(125, 20),
  ]);
}

/** An id, a text and other values that a page must not take for HTML. Each would call `alert` or change the page. */
export const HOSTILE = {
  id: `<img src=x onerror=alert(1)>/"'&?#%2F`,
  user: `"><script>alert(2)</script>`,
  text: `</div></script><script>alert(3)</script><img src=x onerror="alert(4)"><svg onload=alert(5)> javascript:alert(6)
    <iframe srcdoc="<script>alert(7)</script>"></iframe> {{constructor.constructor('alert(8)')()}} \u202Eevil\u202C <style>*{display:none}</style>`,
};

/** Records a session whose every value is HTML. */
export async function recordHostileSession(service) {
  const { id, user, text } = HOSTILE;
  const turn = (seq) => [
    { role: "user", content: `${text} ${seq}. We decided that the ${TOPICS[seq % 8]} <b>opens</b> on day ${seq}.`, name: "x" },
    { role: "assistant", content: [{ type: "text", text }], tool_calls: [call(`<b>${seq}</b>`, "tool", { html: text })] },
    { role: "tool", tool_call_id: `<b>${seq}</b>`, content: text },
    { role: "assistant", content: `Answer ${seq}: ${text}` },
  ];
  const turns = Array.from({ length: 12 }, (_, index) => turn(index)).flat();
  await service.append(id, turns, { user_id: user, metadata: { html: text } });
  await service.put(`/users/${encodeURIComponent(user)}/memory`, { content: `# Memory\n\n${text}` });
  await service.put(`/users/${encodeURIComponent(user)}/memory`, { content: `# Memory\n\n${text}\n\n- ${text}` });
  await service.consolidate(id);
}
