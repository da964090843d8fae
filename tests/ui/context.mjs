// Tasks with the next context of a session.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { promisify } from "node:util";
import { Tab } from "./browser.mjs";
import { HOSTILE, recordLongResult } from "./service.mjs";

const run = promisify(execFile);

/** Returns the rows of the table of tokens by their names. */
async function tokensByPart(tab) {
  const rows = await tab.page.getByRole("region", { name: "Tokens by part" }).locator("tbody tr")
    .evaluateAll((rows) => rows.map((row) => [row.cells[0].textContent, Number(row.cells[1].textContent.replaceAll(",", ""))]));
  return Object.fromEntries(rows);
}

async function seesTokensByPart({ browser, service }) {
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions/large/context");
  await tab.fill("System prompt", "You plan journeys with ferries, for people who do not like to wait.");
  await tab.fill("User message", "When does the last ferry leave?");
  await tab.fill("Budget (max_tokens)", "8000");
  await tab.page.getByLabel("Memory guide").check();
  await service.put("/users/ada/memory", { content: "# Ada\n\n- Likes ferries and window seats.\n" });
  await tab.click("Build");
  await tab.see("% of 8,000");
  const shown = await tokensByPart(tab);
  const body = {
    mode: "off", system_prompt: "You plan journeys with ferries, for people who do not like to wait.",
    user_message: "When does the last ferry leave?", max_tokens: 8000, include_memory_skill: true,
  };
  const context = await service.post("/sessions/large/context", body);
  const { tokens } = context;
  const session = await service.get("/sessions/large");
  const memory = await service.get("/users/ada/memory");
  const { Total: total, "Before the cache boundary": stable, ...parts } = shown;
  assert.equal(total, tokens.total);
  assert.equal(stable, context.cache.stable_tokens);
  assert.equal(Object.values(parts).reduce((sum, value) => sum + value, 0), tokens.total);
  assert.deepEqual(Object.keys(parts), ["System prompt", "Skills", "Memory document", "Summary", "Headings and notice", "Tail", "User message"]);
  assert.deepEqual([parts["Memory document"], parts.Summary, parts.Tail, parts["User message"]],
    [memory.tokens, session.tokens.summary, tokens.history, total - tokens.system - tokens.history - tokens.recall]);
  // The bar has the same proportions, and the boundary is at the stable tokens.
  const bar = await tab.page.locator(".tokens").evaluate((element) => {
    const { width, left } = element.querySelector(".segments").getBoundingClientRect();
    const share = (selector) => element.querySelector(selector).getBoundingClientRect();
    return { tail: share(".segment.tail").width / width, boundary: (share(".boundary").left - left) / width };
  });
  assert.ok(Math.abs(bar.tail - tokens.history / 8000) < 0.01, JSON.stringify(bar));
  assert.ok(Math.abs(bar.boundary - context.cache.stable_tokens / 8000) < 0.01, JSON.stringify(bar));
  await tab.close();
}

/** Returns a value of the coverage, and its colour. */
const coverage = (tab, name) => tab.page.locator(".facts > div").filter({ has: tab.page.getByText(name, { exact: true }) }).locator("dd")
  .evaluate((element) => [element.textContent, getComputedStyle(element.firstElementChild ?? element).color]);

async function seesWhatIsRecalledOmittedAndShortened({ browser, service }) {
  await recordLongResult(service, "departures");
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions/departures/context");
  const user_message = "Who pays 12 euros for the garden?";
  await tab.fill("User message", user_message);
  await tab.click("Build");
  const whole = await service.post("/sessions/departures/context", { mode: "off", user_message });
  const list = whole.recall.map(({ seq }) => seq).join(", ");
  await tab.see(list);
  assert.ok(whole.recall.some(({ seq }) => seq === 12), list);
  const { Total: total, "Before the cache boundary": _, ...parts } = await tokensByPart(tab);
  assert.deepEqual([total, parts.Recalled], [whole.tokens.total, whole.tokens.recall]);
  assert.equal(Object.values(parts).reduce((sum, value) => sum + value, 0), total);
  assert.deepEqual([(await coverage(tab, "Recalled"))[0], (await coverage(tab, "Omitted"))[0]], [list, "none"]);
  await tab.fill("Budget (max_tokens)", "2200");
  await tab.fill("Reserved tokens", "300");
  await tab.click("Build");
  await tab.see("% of 1,900");
  const { omitted: [{ to_seq: last }], shortened: [{ tokens, sent_tokens: sent }] } =
    (await service.post("/sessions/departures/context", { mode: "off", user_message, max_tokens: 2200, reserved_tokens: 300 })).coverage;
  const red = "rgb(168, 32, 26)";
  assert.deepEqual([await coverage(tab, "Omitted"), await coverage(tab, "Shortened")],
    [[`101 to ${last} (max_tokens)`, red], [`123: ${tokens.toLocaleString("en")} to ${sent} tokens`, red]]);
  await tab.checkAccessibility("context that lacks messages");
  await tab.page.locator("pre", { hasText: '"reserved_tokens":300' }).waitFor({ state: "attached" });
  await tab.close();
}

async function copiesRequestInBothFormats({ browser, service }) {
  const tab = await Tab.open(browser, service.url);
  for (const id of ["large", HOSTILE.id]) {
    await tab.goto(`/sessions/${encodeURIComponent(id)}/context`);
    for (const format of ["openai", "anthropic"]) {
      await tab.page.getByLabel("Format").selectOption(format);
      await tab.fill("System prompt", "It's Ada's \"$HOME\" `agent`.");
      await tab.click("Build");
      await tab.heading(`Messages (${format})`, 3);
      await tab.see("It's Ada's", tab.page.locator(".messages"));
      await tab.click("Copy as curl");
      await tab.until(() => document.getElementById("status").textContent === "Copied.");
      const command = await tab.page.evaluate(() => navigator.clipboard.readText());
      const { stdout } = await run("sh", ["-c", command], { maxBuffer: 1 << 26 });
      await tab.click("Copy the list");
      await tab.until(async () => (await navigator.clipboard.readText()).startsWith("{"));
      const list = JSON.parse(await tab.page.evaluate(() => navigator.clipboard.readText()));
      const { system, messages } = JSON.parse(stdout);
      assert.deepEqual(list, system === undefined ? { messages } : { system, messages });
      assert.match(JSON.stringify(list), /It's Ada's/);
    }
  }
  await tab.close();
}

async function seesThatABudgetIsTooSmall({ browser, service }) {
  const tab = await Tab.open(browser, service.url, { expected: ["status of 422"] });
  await tab.goto("/sessions/large/context");
  await tab.fill("Budget (max_tokens)", "5");
  await tab.click("Build");
  const problem = await tab.page.getByRole("alert").innerText();
  assert.match(problem, /max_tokens/);
  await tab.fill("Budget (max_tokens)", "1300");
  await tab.click("Build");
  await tab.see(/^[0-9,]+ to [0-9,]+ \(max_tokens\)$/);
  await tab.close();
}

export const tasks = [
  ["see the tokens of the next context by part", seesTokensByPart],
  ["see what is recalled, omitted and shortened", seesWhatIsRecalledOmittedAndShortened],
  ["copy the request of a context in both formats", copiesRequestInBothFormats],
  ["see that a budget is too small", seesThatABudgetIsTooSmall],
];
