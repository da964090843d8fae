// The turn that the programs record, in the types of the official client, and where they record it.

import assert from "node:assert/strict";
import type {
  ChatCompletionAssistantMessageParam,
  ChatCompletionToolMessageParam,
  ChatCompletionUserMessageParam,
} from "openai/resources/chat/completions";

function argument(index: number): string {
  const value = process.argv[index];
  assert(value);
  return value;
}

export const [url, SESSION, USER, key] = [argument(2), argument(3), argument(4), argument(5)];

const question = {
  role: "user",
  content: [{ type: "text", text: "When does the ferry leave?" }],
} satisfies ChatCompletionUserMessageParam;
const call = {
  role: "assistant",
  content: null,
  tool_calls: [{ id: "call_1", type: "function", function: { name: "timetable", arguments: '{"line": 3}' } }],
} satisfies ChatCompletionAssistantMessageParam;
const result = { role: "tool", tool_call_id: "call_1", content: "09:00" } satisfies ChatCompletionToolMessageParam;
const answer = { role: "assistant", content: "At nine." } satisfies ChatCompletionAssistantMessageParam;

export const exchange = [question, call, result, answer];
