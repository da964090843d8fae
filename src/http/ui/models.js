// The state of the model pools: circuit breakers, queues, last failures, and the tokens of the day.

import { get, poll } from "./api.js";
import { announce, count, errorBox, facts, h, milliseconds, number, replace, table, time } from "./dom.js";

const POOLS = [{ name: "Pool" }, { name: "Tasks" }, { name: "Models" }, { name: "Order" }, { name: "Deadline", class: "number" }];

const MODELS = [
  { name: "Model" },
  { name: "Circuit breaker" },
  { name: "Calls", class: "number" },
  { name: "Queue", class: "number" },
  { name: "Last success" },
  { name: "Last failure" },
];

const TASKS = { consolidation: "consolidation", meta_consolidation: "meta-consolidation", rerank: "reranking" };
const STATES = { closed: "closed", half_open: "half-open: one call probes the model", open: "open: the model is skipped" };

const poolRow = ({ name, tasks, models, strategy, deadline_ms: deadline }) =>
  [name, tasks.map((task) => TASKS[task] ?? task).join(", ") || "none", models.join(", "), strategy === "round_robin" ? "in rotation" : "in this order", milliseconds(deadline)];

function modelRow(model) {
  const { circuit_breaker: breaker, last_failure: failure, retry_not_before: pause } = model;
  return [
    [model.name, h("small", null, ` ${model.provider}, ${model.model}`)],
    [h("span", { class: breaker.state === "closed" ? "badge" : "badge bad" }, STATES[breaker.state] ?? breaker.state),
      breaker.until && [" until ", time(breaker.until)], pause && h("p", null, "No call before ", time(pause), ", as the provider asked")],
    `${number(model.calls_in_progress)} of ${number(model.max_concurrent_calls)}`,
    `${number(model.queued_calls)} of ${number(model.max_queued_calls)}`,
    time(model.last_success_at),
    failure ? [time(failure.at), h("p", null, failure.reason)] : "–",
  ];
}

export async function modelsView({ main, signal }) {
  const content = h("div");
  const problem = h("div");
  let shown = "";
  async function load() {
    const state = await get("/models", {}, signal);
    if (JSON.stringify(state) === shown) return;
    if (shown !== "") announce("The state of the models changed.");
    shown = JSON.stringify(state);
    const { used_today: used, daily_limit: limit } = state.tokens;
    replace(content,
      facts([["Tokens of today", limit === null ? `${number(used)}, without a limit` : `${number(used)} of ${number(limit)}`]]),
      h("h2", null, "Models"), state.models.length > 0 ? table("Models", MODELS, state.models.map(modelRow)) : h("p", null, "No pool has a model."),
      h("h2", null, "Pools"), state.pools.length > 0 ? table("Pools", POOLS, state.pools.map(poolRow)) : h("p", null, "There is no pool: consolidation is disabled."));
  }
  main.replaceChildren(h("h1", { tabindex: "-1" }, "Models"),
    h("p", null, "As the replica that responded sees them, for all tenants together. The tokens are those of this tenant."), problem, content);
  await load();
  poll(async () => {
    try {
      await load();
      replace(problem);
    } catch (error) {
      if (!signal.aborted) replace(problem, errorBox(error));
    }
  }, signal);
}
