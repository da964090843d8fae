// Turns of an agent of the Vercel AI SDK with its own memory or with precis. See tests/agents.rs.

import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import * as precis from "../../examples/memory_ai_sdk.mjs";
import { Session } from "../../examples/precis_client.mjs";

// The packages are in a folder of their own, not next to this file.
const require = createRequire(`${process.env.PRECIS_AGENTS_NODE}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, jsonSchema, stepCountIs, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");

const [store, turns] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "scripted", baseURL: process.env.MODEL_URL })("scripted");
const inputSchema = jsonSchema({ type: "object", properties: { box: { type: "integer" } }, required: ["box"] });
const look = ({ box }) => `In box ${box} are ${box + 2} lemons.`;
const weigh = ({ box }) => ({ box, kilograms: box / 4, notes: ["Zoë", null] });
const tools = {
  look: tool({ description: "Looks into a box.", inputSchema, execute: look }),
  weigh: tool({ description: "Weighs a box.", inputSchema, execute: weigh }),
};
const options = { model, tools, instructions: "You know the boxes.", stopWhen: stepCountIs(5), maxRetries: 0 };
globalThis.AI_SDK_LOG_WARNINGS = false;
const memory = [];
for (let turn = 0; turn < Number(turns); turn += 1) {
  const user = { role: "user", content: `Turn ${turn}: what is in box ${turn}?` };
  const messages = [...(store === "precis" ? await precis.load("agents") : memory), user];
  const result = await generateText({ ...options, messages, allowSystemInMessages: true });
  const added = [user, ...result.responseMessages];
  memory.push(...added);
  if (store === "precis") await precis.save("agents", added);
}
if (store === "precis") {
  const kept = await new Session("agents").originals();
  assert.deepEqual(kept, JSON.parse(JSON.stringify(memory)));
}
