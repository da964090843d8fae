// The dry run of a consolidation: what would be summarised now, with which prompt, at which estimated cost.

import { get } from "./api.js";
import { count, facts, h, number, price, replace, table } from "./dom.js";
import { textBlock } from "./messages.js";

const COLUMNS = [
  { name: "Order", class: "number" },
  { name: "Model" },
  { name: "Prompt version" },
  { name: "Longest response", class: "number" },
  { name: "Estimated cost", class: "number" },
];

/** Returns why a consolidation is due, or not. */
function reasonOf({ due, tail_messages: messages, tail_tokens: tokens, window, threshold, max_tail_tokens: mostTokens }) {
  if (due === "threshold") return `Due: the tail has ${count(messages, "message")}, more than consolidation.threshold (${number(threshold)}).`;
  if (due === "window") return `Due: the context takes more than consolidation.trigger_share of its window (${number(window)} tokens).`;
  if (due === "max_tail_tokens") return `Due: the tail has ${count(tokens, "token")}, more than consolidation.max_tail_tokens (${number(mostTokens)}).`;
  if (window !== null) return `Not due: the context takes at most consolidation.trigger_share of its window (${number(window)} tokens).`;
  const limit = mostTokens === null ? "" : `, and ${count(tokens, "token")} of ${number(mostTokens)} (consolidation.max_tail_tokens)`;
  return `Not due: the tail has ${count(messages, "message")} of ${number(threshold)} (consolidation.threshold)${limit}.`;
}

export async function dryRunTab({ panel, session, base, signal }) {
  async function load() {
    const preview = await get(`${base}/consolidations/next`, {}, signal);
    replace(panel, h("p", null, "The consolidation that would run now. No model is called, and nothing is stored."),
      h("p", { class: "note" }, reasonOf(preview)), planNodes(preview));
  }

  await load();
  return { update: load };
}

function planNodes({ plan, pool, strategy, models }) {
  const order = strategy === "round_robin" ? `Pool ${pool}, which begins with another model each time` : `Pool ${pool}, tried in this order`;
  const row = ({ name, prompt_version: version, output_limit: longest, estimated_cost: cost }, index) =>
    [number(index + 1), name, version, count(longest, "token"), cost === null ? "no prices set" : price(cost)];
  const list = [h("h3", null, "Models"), h("p", null, `${order}.`), table("Models of the pool", COLUMNS, models.map(row))];
  if (!plan) {
    return [h("p", null, "Nothing can be summarised: all messages stay verbatim, or a tool call without a result precedes the others."), list];
  }
  const { first_batch: first } = plan;
  return [
    h("h3", null, "Plan"),
    facts([
      ["Messages", `${number(plan.from_seq)} to ${number(plan.to_seq)}`],
      ["Batches", number(plan.batches)],
      ["Model calls", number(plan.calls)],
      ["Tokens of the prompts", `about ${number(plan.input_tokens)}`],
      ["Tokens of the responses", `about ${number(plan.output_tokens)}`],
    ]),
    list,
    h("h3", null, "Prompt"),
    first.sentences > 0 && h("p", null,
      `The first call has the messages ${number(first.from_seq)} to ${number(first.to_seq)} and requests ${count(first.sentences, "sentence")}.`),
    first.prompt ? [
      h("p", { class: "muted" }, count(first.prompt.tokens, "token")),
      h("h4", null, "System message"), textBlock(first.prompt.system),
      h("h4", null, "User message"), textBlock(first.prompt.user),
      first.prompt.is_truncated && h("p", { class: "muted" }, "Only the beginning is shown."),
    ] : h("p", null, first.sentences > 0 ? "The built-in summariser reads no prompt." : "The messages have no text, so no model is called."),
  ];
}
