// Messages in both formats, as they are stored.

import { button, h, number, time } from "./dom.js";

/** Longer texts are cut until they are opened. */
const MAX_CHARACTERS = 2000;

/** Returns the content of a message as a list of parts: a text becomes one part. */
const partsOf = ({ content }) => (typeof content === "string" ? [{ type: "text", text: content }] : Array.isArray(content) ? content : []);

const isCall = (part) => typeof part.type === "string" && part.type.endsWith("tool_use");

/** Returns the tool calls of a message: `{id, name, input}`. */
export function callsOf(message) {
  const calls = (message.tool_calls ?? []).map((call) => {
    const made = call.function ?? call.custom ?? {};
    return { id: call.id, name: made.name, input: made.arguments ?? made.input };
  });
  const old = message.function_call;
  if (old) calls.push({ id: `function_${old.name}`, name: old.name, input: old.arguments });
  const blocks = partsOf(message).filter(isCall);
  return [...calls, ...blocks.map(({ id, name, input }) => ({ id, name, input: JSON.stringify(input, null, 2) }))];
}

/** Returns the ids of the calls whose results the message contains. */
export function answeredCalls(message) {
  const ids = partsOf(message).map((part) => part.tool_use_id).filter(Boolean);
  if (message.role === "tool" && message.tool_call_id) ids.push(message.tool_call_id);
  if (message.role === "function") ids.push(`function_${message.name}`);
  return ids;
}

/** Returns the `seq` of the messages with a call that no later message answers. Messages are oldest first. */
export function pendingCalls(messages) {
  const answered = new Set();
  const pending = [];
  for (const { seq, message } of messages.toReversed()) {
    if (callsOf(message).some(({ id }) => !answered.has(id))) pending.unshift(seq);
    for (const id of answeredCalls(message)) answered.add(id);
  }
  return pending;
}

/** Returns a text as it was written, cut if it is long. */
export function textBlock(text) {
  const block = h("div", { class: "text" }, text.length > MAX_CHARACTERS ? text.slice(0, MAX_CHARACTERS) : text);
  if (text.length <= MAX_CHARACTERS) return block;
  const rest = button(`Show all ${number(text.length)} characters`, () => {
    block.textContent = text;
    rest.remove();
  });
  return h("div", null, block, rest);
}

/** Returns JSON that is shown, and formatted, when it is opened. */
export function json(label, value) {
  const open = (event) => {
    if (event.target.open && event.target.children.length === 1) event.target.append(h("pre", null, JSON.stringify(value, null, 2)));
  };
  return h("details", { ontoggle: open }, h("summary", null, label));
}

function partNode(part) {
  if (typeof part.text === "string") return textBlock(part.text);
  if (typeof part.refusal === "string") return textBlock(part.refusal);
  if (typeof part.thinking === "string") return h("details", null, h("summary", null, "Thinking"), textBlock(part.thinking));
  if (isCall(part)) return null;
  if (part.type === "tool_result") {
    return h("div", null, h("div", { class: "muted" }, `Result of ${part.tool_use_id}`), partsOf(part).map(partNode));
  }
  return json(`Part of the type ${part.type}`, part);
}

/** Returns the content of a message in either format. */
export function messageBody(message) {
  const parts = partsOf(message).map(partNode);
  const calls = callsOf(message).map(({ id, name, input }) =>
    h("div", { class: "call" }, h("div", null, "Calls ", h("code", null, name ?? "?"), h("span", { class: "muted" }, ` ${id ?? ""}`)),
      input && textBlock(input)));
  const result = message.tool_call_id && h("div", { class: "muted" }, `Result of ${message.tool_call_id}`);
  const refusal = typeof message.refusal === "string" && textBlock(message.refusal);
  return [result, ...parts, refusal, ...calls];
}

/** Returns an item of a list of stored messages. `marks` are texts such as `pending call`, `place` follows the head. */
export function messageItem({ seq, created_at: at, redacted_at: redactedAt, message }, marks = [], actions = [], place = null) {
  // An answer that came by the proxy says so in its field `extra`.
  const { proxy, partial } = message.extra?.precis ?? {};
  const badges = [redactedAt && "redacted", proxy && "by proxy", partial && "partial", ...marks].filter(Boolean);
  return h("li", { class: `message ${message.role}`, id: `message-${seq}`, tabindex: "-1" },
    h("div", { class: "head" }, h("span", { class: "seq" }, number(seq)), h("strong", null, message.role), h("span", { class: "muted" }, time(at)),
      badges.map((badge) => h("span", { class: "badge" }, badge)), h("span", { class: "end" }, actions)), place,
    messageBody(message), json("JSON", message));
}
