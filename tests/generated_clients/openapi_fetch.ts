// A round trip with openapi-fetch and the types of openapi-typescript.

import assert from "node:assert/strict";
import type { MessageCreateParams, Tool } from "@anthropic-ai/sdk/resources/messages";
import createClient from "openapi-fetch";
import type { ChatCompletionMessageParam, ChatCompletionTool } from "openai/resources/chat/completions";
import type { paths } from "./generated/openapi-typescript";
import { SESSION, USER, exchange, key, url } from "./turn";

const client = createClient<paths>({ baseUrl: url, headers: { authorization: `Bearer ${key}` } });
const session = { path: { session_id: SESSION } };
const copy = { path: { session_id: "copy" } };
const user = { path: { user_id: USER } };

async function main() {
  const recorded = await client.POST("/sessions/{session_id}/exchanges", {
    params: session,
    body: { messages: exchange, user_id: USER, metadata: { topic: "travel" } },
  });
  assert.deepEqual([recorded.data?.first_seq, recorded.data?.last_seq], [1, 4]);
  for (const replayed of [null, "true"]) {
    const { data, response } = await client.POST("/sessions/{session_id}/exchanges", {
      params: { ...session, header: { "Idempotency-Key": "second-turn" } },
      body: { user_message: [{ type: "text", text: "Thanks." }], assistant_reply: "You're welcome." },
    });
    assert.deepEqual([data?.first_seq, response.headers.get("idempotent-replayed")], [5, replayed]);
  }

  const messages = [];
  let cursor: string | null | undefined;
  do {
    const query = { limit: 4, ...(cursor ? { cursor } : {}) };
    const page = await client.GET("/sessions/{session_id}/messages", { params: { ...session, query } });
    assert(page.data);
    messages.push(...page.data.items);
    cursor = page.data.next;
  } while (cursor);
  assert.deepEqual(messages.map(({ seq }) => seq), [1, 2, 3, 4, 5, 6]);
  assert.deepEqual(messages.slice(0, 4).map(({ message }) => message), exchange);

  // A list for one model is stored in another session, and continued there in the format of the other one.
  const given = await client.POST("/sessions/{session_id}/context", { params: session });
  assert(given.data?.format === "openai" && given.data.fields === "standard");
  const forOpenAi: ChatCompletionMessageParam[] = given.data.messages;
  assert.deepEqual(forOpenAi.slice(0, 4), exchange);
  const stored = await client.POST("/sessions/{session_id}/sync", { params: copy, body: { messages: forOpenAi } });
  assert.deepEqual([stored.data?.matched, stored.data?.appended], [0, 6]);
  const other = await client.POST("/sessions/{session_id}/context", {
    params: session,
    body: { format: "anthropic", system_prompt: "Be kind.", cache_control: true },
  });
  assert(other.data?.format === "anthropic");
  const { system, messages: forAnthropic }: Pick<MessageCreateParams, "system" | "messages"> = other.data;
  assert.deepEqual(system, [{ type: "text", text: "Be kind.", cache_control: { type: "ephemeral" } }]);
  const same = await client.POST("/sessions/{session_id}/sync", {
    params: copy,
    body: { format: "anthropic", messages: forAnthropic },
  });
  assert.deepEqual([same.data?.matched, same.data?.appended], [6, 0]);
  const complete = await client.POST("/sessions/{session_id}/context", { params: session, body: { fields: "all" } });
  assert(complete.data?.format === "openai" && complete.data.fields === "all");
  assert.deepEqual(complete.data.messages, forOpenAi);

  const openAiTools = await client.GET("/tools");
  assert(openAiTools.data?.format === "openai");
  const definitions: ChatCompletionTool[] = openAiTools.data.tools;
  const anthropicTools = await client.GET("/tools", { params: { query: { format: "anthropic" } } });
  assert(anthropicTools.data?.format === "anthropic");
  const otherDefinitions: Tool[] = anthropicTools.data.tools;
  assert.deepEqual(definitions.map((tool) => tool.type === "function" && tool.function.name), otherDefinitions.map(({ name }) => name));

  const revision = await client.POST("/sessions/{session_id}/consolidations", { params: session });
  assert.equal(revision.response.status, 201);
  assert.deepEqual([revision.data?.revision, revision.data?.kind], [1, "consolidation"]);
  const revisions = await client.GET("/sessions/{session_id}/revisions", { params: session });
  assert.deepEqual(revisions.data?.items, [revision.data]);

  const search = await client.GET("/search", { params: { query: { q: "ferry", session_id: SESSION, role: "user" } } });
  assert.deepEqual(search.data?.items.map(({ message }) => message), [exchange[0]]);

  const none = await client.GET("/users/{user_id}/memory", { params: user });
  const version = none.response.headers.get("etag") ?? undefined;
  assert.deepEqual([none.data?.version, version], [0, '"0"']);
  const body = { content: "# Ada\n\n- Likes ferries.\n" };
  const written = await client.PUT("/users/{user_id}/memory", {
    params: { ...user, header: { "If-Match": version } },
    body,
  });
  assert.deepEqual([written.data?.version, written.data?.content], [1, body.content]);
  const stale = await client.PUT("/users/{user_id}/memory", {
    params: { ...user, header: { "If-Match": version } },
    body,
  });
  assert.deepEqual([stale.error?.status, stale.error?.type], [412, "urn:precis:problem:version-mismatch"]);

  const missing = await client.GET("/sessions/{session_id}", { params: { path: { session_id: "a/b" } } });
  assert.equal(missing.error?.type, "urn:precis:problem:session-not-found");
  const invalid = await client.GET("/search", { params: { query: { q: "" } } });
  assert.deepEqual(invalid.error?.errors?.map(({ field }) => field), ["q"]);
}

main().catch((error: unknown) => {
  console.error(error);
  process.exit(1);
});
