// precis as the message history of the Vercel AI SDK. A turn:
//
//   const user = { role: "user", content: "Where is the key?" };
//   const messages = [...(await load("demo")), user];    // the memory is a system message
//   const result = await generateText({ model, tools, messages, allowSystemInMessages: true });
//   await save("demo", [user, ...result.responseMessages]);

import { Session } from "./precis_client.mjs";

function toChat({ role, content }) {
  const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
  const result = (part) => ({ role, tool_call_id: part.toolCallId, content: JSON.stringify(part.output) });
  if (role === "tool") return parts.map(result);
  const text = parts.filter((part) => part.type === "text").map((part) => part.text).join("");
  const calls = parts.filter((part) => part.type === "tool-call");
  const tool_calls = calls.map(({ toolCallId, toolName, input }) => {
    return { id: toolCallId, type: "function", function: { name: toolName, arguments: JSON.stringify(input) } };
  });
  return [{ role, content: text, tool_calls }];
}

function fromChat({ role, content, tool_calls = [], tool_call_id }) {
  if (role === "tool") {
    const output = JSON.parse(content);
    return { role, content: [{ type: "tool-result", toolCallId: tool_call_id, toolName: "", output }] };
  }
  const calls = tool_calls.map(({ id, function: { name, arguments: input } }) => {
    return { type: "tool-call", toolCallId: id, toolName: name, input: JSON.parse(input) };
  });
  return { role, content: calls.length ? [{ type: "text", text: content ?? "" }, ...calls] : content };
}

export function load(session) {
  return new Session(session).load(fromChat);
}

export function save(session, messages) {
  return new Session(session).append(messages.map((message) => [message, toChat(message)]));
}
