// Tasks with the dry run of a consolidation and with the state of the models.

import assert from "node:assert/strict";
import { Tab } from "./browser.mjs";
import { conversation, HOSTILE } from "./service.mjs";

/** Opens a route of the service that needs a key. */
async function openWithKey(browser, keyed, route) {
  const tab = await Tab.open(browser, keyed.url, { expected: ["status of 401", "status of 502", "status of 503"] });
  await tab.goto(route);
  await tab.fill("API key", keyed.key);
  await tab.click("Use this key");
  return tab;
}

async function seesWhatWouldBeSummarised({ browser, service, keyed }) {
  const text = HOSTILE.text;
  await keyed.append("dry", [...conversation(1, 99), { role: "assistant", content: text }, ...conversation(101, 40)]);
  const tab = await openWithKey(browser, keyed, "/sessions/dry/next");
  await tab.see("Due: the tail has 140 messages, more than consolidation.threshold (100).");
  const { plan, models } = await keyed.get("/sessions/dry/consolidations/next");
  await tab.see("1 to 120");
  await tab.page.getByRole("row", { name: new RegExp(`^1 small ${models[0].prompt_version}`) }).waitFor();
  await tab.page.getByRole("button", { name: /^Show all/ }).last().click();
  const shown = await tab.page.locator("main .text").allTextContents();
  assert.deepEqual(shown, [plan.first_batch.prompt.system, plan.first_batch.prompt.user]);
  assert.ok(shown[1].includes("alert(3)"), "the prompt contains the message");
  assert.equal(await tab.page.locator("main script, main img, main iframe, main style").count(), 0);
  await tab.close();
  const other = await Tab.open(browser, service.url);
  await other.goto("/sessions/large/next");
  await other.see("Not due: the tail has 22 messages of 100 (consolidation.threshold).");
  await other.see("The built-in summariser reads no prompt.");
  await other.close();
}

async function seesTheHealthOfModels({ browser, keyed }) {
  await keyed.append("sick", conversation(1, 60));
  await assert.rejects(keyed.consolidate("sick"), /small/);
  const tab = await openWithKey(browser, keyed, "/models");
  await tab.heading("Models");
  const { models } = await keyed.get("/models");
  const row = tab.page.getByRole("row", { name: /^small/ });
  await row.waitFor();
  assert.match(await row.innerText(), /closed/);
  assert.ok((await row.innerText()).includes(models[0].last_failure.reason), "the last failure is shown");
  await tab.page.getByRole("row", { name: /^default consolidation, meta-consolidation small/ }).waitFor();
  // A later failure appears without reloading. Its text can be the same, because it shows whole seconds.
  const before = await row.locator("time").last().getAttribute("datetime");
  await assert.rejects(keyed.consolidate("sick"), /small/);
  await tab.until((before) => [...document.querySelectorAll("tbody tr:first-child time")].at(-1).dateTime !== before, before);
  await tab.close();
}

export const tasks = [
  ["see what would be summarised", seesWhatWouldBeSummarised],
  ["see the health of models", seesTheHealthOfModels],
];
