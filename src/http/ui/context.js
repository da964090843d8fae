// The next context of a session: its tokens by part against the budget, and the exact messages.

import { get, path, request, storedKey, urlOf } from "./api.js";
import { announce, attempt, button, count, facts, field, h, number, replace, table } from "./dom.js";
import { messageBody } from "./messages.js";
import { sessionLink } from "./sessions.js";

const PARTS = {
  prompt: "System prompt",
  skills: "Skills",
  memory: "Memory document",
  summary: "Summary",
  other: "Headings and notice",
  tail: "Tail",
  recall: "Recalled",
  user: "User message",
};

export async function contextTab({ panel, session, base, signal }) {
  const prompt = h("textarea", { rows: "2" });
  const user = h("textarea", { rows: "2" });
  const budget = h("input", { type: "number", min: "1", inputmode: "numeric" });
  const reserved = h("input", { type: "number", min: "0", inputmode: "numeric" });
  const format = h("select", null, h("option", { value: "openai" }, "openai"), h("option", { value: "anthropic" }, "anthropic"));
  const guide = h("input", { type: "checkbox" });
  const skills = h("textarea", { rows: "2", spellcheck: "false", placeholder: '[{"name": "…", "description": "…"}]' });
  const build = h("button", { type: "submit", class: "primary" }, "Build");
  const problem = h("div");
  const result = h("div");
  const submit = (event) => {
    event.preventDefault();
    attempt(build, problem, show);
  };
  panel.replaceChildren(
    h("p", null, "The messages that the agent would receive now, without consolidating the session first. Nothing is stored."),
    h("form", { class: "form", onsubmit: submit },
      field("System prompt", prompt), field("User message", user),
      h("div", { class: "bar" }, field("Budget (max_tokens)", budget), field("Reserved tokens", reserved), field("Format", format),
        h("label", { class: "check" }, guide, "Memory guide")),
      h("details", null, h("summary", null, "Skills"), field("Skills as JSON", skills)),
      h("div", { class: "actions" }, build)),
    problem, result);

  function options() {
    const body = { mode: "off", format: format.value };
    if (prompt.value) body.system_prompt = prompt.value;
    if (user.value) body.user_message = user.value;
    if (budget.value) body.max_tokens = Number(budget.value);
    if (reserved.value) body.reserved_tokens = Number(reserved.value);
    if (guide.checked) body.include_memory_skill = true;
    if (skills.value.trim()) body.skills = parseSkills(skills.value);
    return body;
  }

  async function show() {
    const body = options();
    const context = await request("POST", `${base}/context`, { body, signal });
    replace(result, await resultNodes(body, context));
  }

  async function resultNodes(body, context) {
    const parts = await tokensByPart(body, context);
    const { cache, coverage, recall, tokens } = context;
    const most = body.max_tokens === undefined ? null : body.max_tokens - (body.reserved_tokens ?? 0);
    const recalled = recall.map(({ session_id: id, seq }, index) => [index > 0 && ", ",
      h("a", { href: sessionLink(id, "history", `?seq=${seq}`) }, id === session.session_id ? number(seq) : `${number(seq)} of ${id}`)]);
    const omitted = coverage.omitted.map(({ from_seq: from, to_seq: to, reason }) => `${number(from)} to ${number(to)} (${reason})`);
    const shortened = coverage.shortened.map(({ seq, tokens: stored, sent_tokens: sent }) => `${number(seq)}: ${number(stored)} to ${count(sent, "token")}`);
    /** Returns what the agent does not see. */
    const missing = (texts) => (texts.length > 0 ? h("span", { class: "bad" }, texts.join("; ")) : "none");
    const covered = [
      ["Summarised", coverage.summary_through > 0
        ? `1 to ${number(coverage.summary_through)}${context.summary.model ? `, by ${context.summary.model}` : ""}` : "none"],
      ["Verbatim", coverage.verbatim_from <= coverage.last_seq ? `${number(coverage.verbatim_from)} to ${number(coverage.last_seq)}` : "none"],
      coverage.repeated && ["Repeated", number(coverage.repeated)],
      ["Recalled", recalled.length > 0 ? recalled : "none"],
      ["Omitted", missing(omitted)],
      ["Shortened", missing(shortened)],
      ["Tokenizer", tokens.tokenizer],
    ];
    return [
      h("h3", null, "Tokens"),
      tokenBar(parts, tokens.total, most, cache.stable_tokens),
      table("Tokens by part", [{ name: "Part" }, { name: "Tokens", class: "number" }, { name: "Share", class: "number" }],
        [...parts.map(([kind, value]) => [[h("span", { class: `swatch ${kind}` }), PARTS[kind]], number(value), `${Math.round((value / tokens.total) * 100)} %`]),
          ["Total", number(tokens.total), most === null ? "no budget" : `${Math.round((tokens.total / most) * 100)} % of ${number(most)}`],
          ["Before the cache boundary", number(cache.stable_tokens), `${Math.round((cache.stable_tokens / tokens.total) * 100)} %`]]),
      h("h3", null, "Coverage"), facts(covered),
      h("h3", null, `Messages (${context.format})`),
      exactMessages(context),
      h("h3", null, "Request"), copyable("Copy as curl", curl(body)),
      h("h3", null, "Response"), copyable("Copy the list", JSON.stringify({ system: context.system, messages: context.messages }, null, 2)),
    ];
  }

  /**
   * Returns the tokens of each part. The service reports the system message as one number, so the context is built again
   * without the parts of the request.
   */
  async function tokensByPart(body, { tokens, memory, summary, user_id: owner }) {
    const { mode, format, system_prompt: ownPrompt } = body;
    const system = async (prompt) =>
      (await request("POST", `${base}/context`, { body: { mode, format, system_prompt: prompt }, signal })).tokens.system;
    const hasSkills = body.skills !== undefined || body.include_memory_skill;
    const bare = ownPrompt || hasSkills ? await system() : tokens.system;
    const withPrompt = !ownPrompt ? bare : hasSkills ? await system(ownPrompt) : tokens.system;
    const document = memory.version > 0 && owner !== null ? (await get(path("users", owner, "memory"), {}, signal)).tokens : 0;
    const text = summary.revision > 0 ? (await get(base, {}, signal)).tokens.summary : 0;
    const parts = {
      prompt: withPrompt - bare,
      skills: tokens.system - withPrompt,
      memory: document,
      summary: text,
      other: Math.max(0, bare - document - text),
      tail: tokens.history,
      recall: tokens.recall,
      user: tokens.total - tokens.system - tokens.history - tokens.recall,
    };
    return Object.entries(parts).filter(([, value]) => value > 0);
  }

  function curl(body) {
    const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
    const key = storedKey() ? ' -H "Authorization: Bearer $PRECIS_API_KEY"' : "";
    return `curl -sS${key} --json ${quote(JSON.stringify(body))} ${quote(urlOf(`${base}/context`).href)}`;
  }

  await attempt(build, problem, show);
  return { update: () => attempt(build, problem, show) };
}

function parseSkills(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw Object.assign(new Error(`The skills must be a JSON list: ${error.message}.`), { title: "Invalid skills" });
  }
}

/** Returns the bar of tokens: its width is the budget, or the total if there is none or it is smaller. */
function tokenBar(parts, total, budget, stable) {
  const width = Math.max(total, budget ?? 0, 1);
  const percent = (value) => `${(value / width) * 100}%`;
  const segments = parts.map(([kind, value]) =>
    h("div", { class: `segment ${kind}`, title: `${PARTS[kind]}: ${count(value, "token")}`, style: { width: percent(value) } }));
  const label = parts.map(([kind, value]) => `${PARTS[kind]} ${number(value)}`).join(", ");
  const limit = budget === null ? "no budget" : `budget ${number(budget)}`;
  return h("div", { class: "tokens", role: "img", "aria-label": `${label}; total ${count(total, "token")}, ${limit}, cache boundary at ${number(stable)}` },
    h("div", { class: "segments" }, segments),
    h("div", { class: stable < width / 4 ? "boundary early" : "boundary", style: { left: percent(stable) } }, h("span", null, "cache")));
}

/** Returns the list in the order in which the model receives it, with the cache boundary. */
function exactMessages({ system, messages, cache }) {
  const boundary = () => h("li", { class: "cache-boundary" }, `Cache boundary: the ${count(cache.stable_tokens, "token")} above stay the same until the summary changes.`);
  const item = (role, content) => h("li", { class: `message ${role}` }, h("div", { class: "head" }, h("strong", null, role)), content);
  const items = messages.map((message) => item(message.role, messageBody(message)));
  items.splice(cache.stable_messages, 0, boundary());
  if (system !== undefined) items.unshift(item("system", messageBody({ content: system })));
  return h("ol", { class: "messages plain" }, items);
}

/** Returns a text with a button that copies it. */
function copyable(label, text) {
  const problem = h("div");
  const copy = button(label, () => attempt(copy, problem, async () => {
    // Browsers offer the clipboard to pages of https and localhost only.
    if (!navigator.clipboard) throw Object.assign(new Error("This browser copies only on https or localhost. Select the text below."), { title: "Not copied" });
    await navigator.clipboard.writeText(text);
    announce("Copied.");
  }));
  return [h("div", { class: "actions" }, copy), problem, h("details", null, h("summary", null, "Show"), h("pre", { class: "text" }, text))];
}
