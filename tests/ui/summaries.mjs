// Tasks with the revisions of a summary.

import assert from "node:assert/strict";
import { PHONE, Tab } from "./browser.mjs";
import { conversation, HOSTILE } from "./service.mjs";

/** Records a session with two revisions. Its messages are so short that the second summary is not compressed. */
async function recordTwoRevisions(service, id) {
  const brief = (first) => conversation(first, 60).map(({ role, content }) => ({ role, content: content.split(" ").slice(0, 4).join(" ") }));
  await service.append(id, brief(1));
  await service.consolidate(id);
  await service.append(id, brief(61));
  await service.consolidate(id);
}

async function comparesRevisions({ browser, service }) {
  await recordTwoRevisions(service, "compared");
  const [second, first] = (await service.get("/sessions/compared/revisions")).items;
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions/compared/summary");
  const column = (name) => tab.page.getByRole("group", { name, exact: true }).locator(".text");
  await column("Revision 2").waitFor();
  // Both texts are complete. The second is the first with an addition.
  assert.equal(await column("Revision 1").textContent(), first.text);
  assert.equal(await column("Revision 2").textContent(), second.text);
  assert.equal(await column("Revision 1").locator("del").count(), 0);
  assert.equal((await column("Revision 2").locator("ins").allTextContents()).join("").trim(), second.added);
  await tab.see(`${first.tokens} → ${second.tokens} (+${second.tokens - first.tokens})`);
  await tab.page.getByLabel("Before", { exact: true }).selectOption("0");
  await column("Revision 0").waitFor({ state: "attached" });
  assert.equal(await column("Revision 2").locator("ins").textContent(), second.text);
  await tab.close();
}

async function comparesAnyTexts({ browser, service }) {
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions");
  const checked = await tab.page.evaluate(async () => {
    const { compare } = await import(`${location.origin}/ui/diff.js`);
    const words = ["tea", " ", "\n", "coffee", "お茶", "…", "<b>", "Ada's", ""];
    let seed = 7;
    const random = (most) => (seed = (seed * 16807) % 2147483647) % most;
    const text = (length) => Array.from({ length }, () => words[random(words.length)]).join("");
    const kept = (parts, kind) => parts.filter((part) => part.kind === "same" || part.kind === kind).map((part) => part.text).join("");
    let pairs = 0;
    for (; pairs < 500; pairs += 1) {
      const before = text(random(40));
      const after = random(2) === 0 ? text(random(40)) : before.slice(0, random(20)) + text(random(5)) + before.slice(random(20));
      const parts = compare(before, after);
      if (kept(parts, "removed") !== before || kept(parts, "added") !== after) throw new Error(JSON.stringify([before, after, parts]));
      if (before === after && parts.some(({ kind }) => kind !== "same")) throw new Error(JSON.stringify([before, parts]));
    }
    const parts = compare("Ada likes green tea.", "Ada drinks green tea daily.");
    return { pairs, parts: parts.map(({ kind, text }) => `${kind}:${text}`) };
  });
  assert.equal(checked.pairs, 500);
  assert.deepEqual(checked.parts, ["same:Ada ", "removed:likes", "added:drinks", "same: green tea", "added: daily", "same:."]);
  await tab.close();
}

async function restoresRevision({ browser, service }) {
  await recordTwoRevisions(service, "restored");
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions/restored/summary");
  await tab.click("Restore revision 1…");
  await tab.page.getByRole("dialog").getByText("covers the messages up to 40").waitFor();
  await tab.click("Restore");
  await tab.page.getByRole("row", { name: /^3 restore up to 40/ }).waitFor();
  await tab.see("revision 3");
  const session = await service.get("/sessions/restored");
  assert.deepEqual([session.summary.revision, session.cursor], [3, 40]);
  await tab.click("Restore revision 0…");
  await tab.click("Restore");
  await tab.see("There is no summary.");
  assert.equal((await service.get("/sessions/restored")).cursor, 0);
  await tab.close();
}

async function editsTheSummary({ browser, service }) {
  await recordTwoRevisions(service, "edited");
  const tab = await Tab.open(browser, service.url, { expected: ["status of 409"] });
  await tab.goto("/sessions/edited/summary");
  await tab.click("Edit…");
  await tab.fill("New summary", "Ada pays, and Miko keeps the key.");
  await tab.click("Save as a new revision");
  await tab.page.getByRole("row", { name: /^3 edit up to 100/ }).waitFor();
  const { cursor, summary } = await service.get("/sessions/edited");
  assert.deepEqual([cursor, summary.revision, summary.text], [100, 3, "Ada pays, and Miko keeps the key."]);
  const column = tab.page.getByRole("group", { name: "Revision 3", exact: true }).locator(".text");
  assert.equal(await column.textContent(), "Ada pays, and Miko keeps the key.");
  // An edit of a revision that is no longer the current one is rejected, and its text remains in the dialog.
  await tab.click("Edit…");
  await tab.fill("New summary", "Outdated.");
  await tab.page.route("**/sessions/edited/revisions", async (route) => {
    if (route.request().method() === "POST") await service.post("/sessions/edited/revisions/1/restore");
    await route.continue();
  });
  await tab.click("Save as a new revision");
  await tab.page.getByRole("dialog").getByRole("alert").waitFor();
  assert.equal(await tab.page.getByLabel("New summary", { exact: true }).inputValue(), "Outdated.");
  assert.equal((await service.get("/sessions/edited")).summary.revision, 4);
  await tab.close();
}

async function seesTheSourcesOfASummary({ browser, service }) {
  await service.append("sourced", conversation(1, 60));
  await service.consolidate("sourced");
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions/sourced/summary");
  await tab.click("Show sources");
  await tab.heading("Sources of revision 1", 3);
  await tab.see("Each sentence has a source.");
  const found = await service.get("/sessions/sourced/revisions/1/sources");
  const items = tab.page.locator(".sources > li");
  assert.deepEqual(await items.locator(".text").allTextContents(), found.sentences.map(({ text }) => text));
  assert.deepEqual(await items.locator("a").allTextContents(), found.sentences.map(({ seq }) => `message ${seq}`));
  assert.deepEqual(await items.locator(".badge").allTextContents(), found.sentences.map(() => "exact"));
  // A sentence that no message supports is marked.
  await service.post("/sessions/sourced/revisions", { summary: "Ada pays 4 euros for the garden. Penguins juggle zeppelins.", based_on: 1 });
  await tab.page.getByRole("row", { name: /^2 edit/ }).waitFor();
  await tab.click("Show sources");
  await tab.see("1 sentence without support: check it.");
  assert.equal(await tab.page.locator(".unsupported .text").textContent(), "Penguins juggle zeppelins.");
  await tab.checkAccessibility("sources");
  await items.locator("a").first().click();
  await tab.until(() => document.activeElement?.id.startsWith("message-"));
  await tab.close();
}

async function followsTheTimeline({ browser, service }) {
  await recordTwoRevisions(service, "followed");
  const revisions = (await service.get("/sessions/followed/revisions")).items;
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions/followed/timeline");
  const chart = tab.page.getByRole("img", { name: /^Tail over messages 1 to 120: at most 80 messages/ });
  await chart.waitFor();
  assert.equal(await chart.locator(".mark.consolidation").count(), 2);
  const rows = await tab.page.getByRole("region", { name: "Consolidations and other changes of the summary" }).locator("tbody tr")
    .evaluateAll((rows) => rows.map((row) => [...row.cells].slice(0, 7).map((cell) => cell.textContent)));
  assert.deepEqual(rows, [
    ["2", "120", "consolidation", "41 to 100", "80 → 20", `${revisions[0].model}`, "0"],
    ["1", "60", "consolidation", "1 to 40", "60 → 20", `${revisions[1].model}`, "0"],
  ]);
  // A new message appears without reloading.
  await service.append("followed", conversation(121, 2));
  await tab.page.getByRole("img", { name: /^Tail over messages 1 to 122/ }).waitFor();
  await tab.page.getByRole("region", { name: "Consolidations and other changes of the summary" }).getByRole("link", { name: "2", exact: true }).click();
  await tab.heading("Compare", 3);
  await tab.close();
}

async function seesFailedConsolidations({ browser, keyed }) {
  await keyed.append("failed", conversation(1, 60));
  for (let attempt = 0; attempt < 2; attempt += 1) await assert.rejects(keyed.consolidate("failed"), /small/);
  await keyed.append("failed", conversation(61, 20));
  await assert.rejects(keyed.consolidate("failed"), /small/);
  const { items: records } = await keyed.get("/sessions/failed/consolidations");
  assert.equal(records.length, 3);
  const tab = await Tab.open(browser, keyed.url, { expected: ["status of 401", "status of 502"] });
  await tab.goto("/sessions/failed/timeline");
  await tab.fill("API key", keyed.key);
  await tab.click("Use this key");
  const chart = tab.page.getByRole("img", { name: /^Tail over messages 1 to 80.*; 0 revisions and 3 consolidations without a result\./ });
  await chart.waitFor();
  const titles = await chart.locator(".mark.failed title").allTextContents();
  assert.equal(titles.length, 2, "failures at the same message share a mark");
  assert.match(titles[0], /^The newest of 2: failed, small, .*: all models of pool "default" failed: small: /);
  const region = tab.page.getByRole("region", { name: "Consolidations and other changes of the summary" });
  const rows = await region.locator("tbody tr").evaluateAll((rows) => rows.map((row) => [...row.cells].slice(0, 7).map((cell) => cell.textContent)));
  const expected = (record, seq) => ["none", `${seq}`, `failed: ${record.reason}`, "–", `${seq}`, "small, 1 failed call", "0"];
  assert.deepEqual(rows, [expected(records[0], 80), expected(records[1], 60), expected(records[2], 60)]);
  assert.ok(records.every(({ models, cost }) => models[0] === "small" && cost === 0));
  await tab.checkAccessibility("timeline with failures");
  // On a phone, the table can be scrolled by keyboard. A further failure appears without reloading, and moves neither focus nor table.
  await tab.page.setViewportSize(PHONE);
  await region.focus();
  await region.evaluate((region) => region.scrollTo(200, 0));
  await assert.rejects(keyed.consolidate("failed"), /small/);
  await tab.page.getByRole("img", { name: /4 consolidations without a result/ }).waitFor();
  assert.equal(await region.locator("tbody tr").count(), 4);
  assert.deepEqual(await region.evaluate((region) => [region === document.activeElement, region.scrollLeft]), [true, 200]);
  await tab.close();
}

async function showsHtmlOfASummaryAsText({ browser, service }) {
  const [revision] = (await service.get(`${service.session(HOSTILE.id)}/revisions`)).items;
  assert.match(revision.text, /<script>/);
  const tab = await Tab.open(browser, service.url);
  await tab.goto(`/sessions/${encodeURIComponent(HOSTILE.id)}/summary`);
  const shown = tab.page.getByRole("group", { name: "Revision 1", exact: true }).locator(".text");
  await shown.waitFor();
  assert.equal(await shown.textContent(), revision.text);
  assert.equal(await tab.page.locator("main script, main img, main iframe, main style").count(), 0);
  await tab.close();
}

export const tasks = [
  ["compare revisions", comparesRevisions],
  ["compare any texts by words", comparesAnyTexts],
  ["restore a revision", restoresRevision],
  ["edit a summary", editsTheSummary],
  ["see the sources of a summary", seesTheSourcesOfASummary],
  ["follow the timeline", followsTheTimeline],
  ["see failed consolidations in the timeline", seesFailedConsolidations],
  ["show HTML of a summary as text", showsHtmlOfASummaryAsText],
];
