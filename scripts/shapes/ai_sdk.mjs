// Shapes that applications build with the Vercel AI SDK, as JSON lines for corpus.py.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The packages are in the folder of the first argument, not next to this file.
const require = createRequire(`${process.argv[2]}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const version = (name) => require(`${name}/package.json`).version;
const { generateText, jsonSchema, stepCountIs, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createAnthropic } = await load("@ai-sdk/anthropic");

globalThis.AI_SDK_LOG_WARNINGS = false;
const asked = { role: "user", content: "Where do we keep the spare key?" };
const final = "Under the third flowerpot.";
const png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";

const replies = [];
let sent;
const fetch = async (_url, init) => {
  sent = JSON.parse(init.body).messages;
  return Response.json(replies.shift());
};
const chat = createOpenAICompatible({ name: "scripted", baseURL: "http://127.0.0.1/v1", fetch })("m");
const claude = createAnthropic({ apiKey: "none", baseURL: "http://127.0.0.1/v1", fetch })("m");

const completion = (message, finish_reason = "stop") => ({
  id: "chatcmpl-1", object: "chat.completion", created: 1760000000, model: "m",
  choices: [{ index: 0, finish_reason, message: { role: "assistant", ...message } }],
  usage: { prompt_tokens: 9, completion_tokens: 9, total_tokens: 18 },
});
const answer = (content, stop_reason = "end_turn") => ({
  id: "msg_1", type: "message", role: "assistant", model: "m", content, stop_reason, stop_sequence: null,
  usage: { input_tokens: 9, output_tokens: 9 },
});
const look = tool({
  description: "Looks at a place.",
  inputSchema: jsonSchema({ type: "object", properties: { place: { type: "string" } }, required: ["place"] }),
  execute: async ({ place }) => (place === "boathouse" ? "nothing but ropes" : { seen: ["a wheelbarrow"] }),
});

// Runs a turn and returns all messages of it, as an application stores them.
const run = async (model, messages, ...scripted) => {
  replies.push(...scripted);
  const result = await generateText({ model, messages, tools: { look }, stopWhen: stepCountIs(4) });
  return [...messages, ...result.responseMessages];
};
const call = (id, place) => ({ id, type: "function", function: { name: "look", arguments: JSON.stringify({ place }) } });
const write = (name, produced, messages, expected, source = "ai") =>
  console.log(JSON.stringify({ name: `ai-sdk-${name}`, package: source, version: version(source), produced, messages, ...expected }));

const found = ["spare key", "boathouse", "ropes", "flowerpot"];
const native = "[...messages, ...result.responseMessages]";
const compatible = "@ai-sdk/openai-compatible";
const calls = completion({ content: "Let me check.", tool_calls: [call("call_1", "boathouse"), call("call_2", "shed")] }, "tool_calls");
const turn = await run(chat, [asked], calls, completion({ content: final }));
write("model-messages", native, turn, { finds: ["spare key", "Let me check", "flowerpot"] });
await run(chat, [...turn, { role: "user", content: "Thanks!" }], completion({ content: "ok" }));
write("request", "request of the provider openai-compatible", sent, { finds: found }, compatible);
write("model-messages-text", native, await run(chat, [asked], completion({ content: final })), { finds: ["spare key", "flowerpot"] });
const thinking = await run(chat, [asked], completion({ content: final, reasoning_content: "The gardening talk." }));
write("model-messages-reasoning", native, thinking, { finds: ["spare key", "flowerpot"], hides: ["gardening talk"] });
await run(chat, [...thinking, { role: "user", content: "Thanks!" }], completion({ content: "ok" }));
write("reasoning", "request of the provider openai-compatible", sent, { finds: ["flowerpot"], hides: ["gardening talk"] }, compatible);

const text = { type: "text", text: "Compare this with the chart." };
const image = { role: "user", content: [text, { type: "image", image: png, mediaType: "image/png" }] };
write("image-part", "messages of generateText", [image], { finds: ["Compare this with the chart"] });
await run(chat, [image], completion({ content: "ok" }));
write("image", "request of the provider openai-compatible", sent, { finds: ["chart"] }, compatible);
const pdf = { role: "user", content: [text, { type: "file", data: "JVBERi0xLjQK", mediaType: "application/pdf", filename: "insurance.pdf" }] };
write("file-part", "messages of generateText", [pdf], { finds: ["chart"] });
const parts = [{ type: "text", text: asked.content }];
write("ui-messages", "messages of useChat", [{ id: "1", role: "user", parts }], { finds: ["spare key"] });

const thought = { type: "thinking", thinking: "The gardening talk.", signature: "ErUBCkYIBxgCIkA".repeat(8) };
const used = { type: "tool_use", id: "toolu_1", name: "look", input: { place: "boathouse" } };
await run(claude, [asked], answer([thought, used], "tool_use"), answer([{ type: "text", text: final }]));
write("anthropic", "request of the provider anthropic", sent,
  { format: "anthropic", finds: ["spare key", "boathouse", "ropes"], hides: ["gardening talk"] }, "@ai-sdk/anthropic");
