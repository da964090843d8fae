// The clients for Node.js for check.py. See clients.py.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The packages are in a folder of their own, not next to this file.
const require = createRequire(`${process.env.PRECIS_PROXY_CLIENTS_NODE}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)));

const SYSTEM = "You add numbers.";
const [client, url, session] = process.argv.slice(2);
const headers = { "x-precis-session": session };
const inPath = `${url}/proxy/${session}`;
const parameters = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
};
const add = ({ a, b }) => String(a + b);
const turns = JSON.parse(process.env.PRECIS_PROXY_CLIENTS_QUESTIONS);

async function openai() {
  const { default: OpenAI } = await load("openai");
  const api = new OpenAI({ apiKey: "none", baseURL: `${inPath}/v1`, maxRetries: 0 });
  const tools = [{ type: "function", function: { name: "add", description: "Adds.", parameters } }];
  const messages = [{ role: "system", content: SYSTEM }];
  for (const [content, stream] of turns) {
    let added = [{ role: "user", content }];
    while (added.length > 0) {
      messages.push(...added);
      const request = { model: "m", messages, tools };
      const completion = stream
        ? await api.chat.completions.stream({ ...request, stream_options: { include_usage: true } }).finalChatCompletion()
        : await api.chat.completions.create(request);
      const { message } = completion.choices[0];
      messages.push(message);
      const result = ({ id, function: { arguments: given } }) => ({ role: "tool", tool_call_id: id, content: add(JSON.parse(given)) });
      added = (message.tool_calls ?? []).map(result);
    }
  }
}

async function anthropic() {
  const { default: Anthropic } = await load("@anthropic-ai/sdk");
  const api = new Anthropic({ apiKey: "none", baseURL: url, defaultHeaders: headers, maxRetries: 0 });
  const tools = [{ name: "add", description: "Adds.", input_schema: parameters }];
  const messages = [];
  for (const [text, stream] of turns) {
    let content = text;
    while (content.length > 0) {
      messages.push({ role: "user", content });
      const request = { model: "m", max_tokens: 500, system: SYSTEM, messages, tools };
      const answer = stream ? await api.messages.stream(request).finalMessage() : await api.messages.create(request);
      messages.push({ role: "assistant", content: answer.content });
      const calls = answer.content.filter((block) => block.type === "tool_use");
      content = calls.map(({ id, input }) => ({ type: "tool_result", tool_use_id: id, content: add(input) }));
    }
  }
}

async function aiSdk(model) {
  globalThis.AI_SDK_LOG_WARNINGS = false;
  const { generateText, jsonSchema, stepCountIs, streamText, tool } = await load("ai");
  const tools = { add: tool({ description: "Adds.", inputSchema: jsonSchema(parameters), execute: add }) };
  const messages = [];
  for (const [content, stream] of turns) {
    messages.push({ role: "user", content });
    const request = { model, tools, instructions: SYSTEM, messages, stopWhen: stepCountIs(5), maxRetries: 0, maxOutputTokens: 500 };
    const result = stream ? streamText(request) : await generateText(request);
    messages.push(...(await result.responseMessages));
  }
}

const clients = {
  "node-openai": openai,
  "node-anthropic": anthropic,
  "node-ai-sdk-openai": async () => {
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    await aiSdk(createOpenAICompatible({ name: "precis", baseURL: `${url}/v1`, headers, includeUsage: true })("m"));
  },
  "node-ai-sdk-anthropic": async () => {
    const { createAnthropic } = await load("@ai-sdk/anthropic");
    await aiSdk(createAnthropic({ baseURL: `${inPath}/v1`, apiKey: "none" })("m"));
  },
};
await clients[client]();
