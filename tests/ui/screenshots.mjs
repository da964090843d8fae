// The pictures of the documentation. They show the session of the README's quick start.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { Tab } from "./browser.mjs";
import { call } from "./service.mjs";

const ID = "porto";

async function recordSession(service) {
  const turns = readFileSync(new URL("../../examples/turns.jsonl", import.meta.url), "utf8").trim().split("\n").map((line) => JSON.parse(line));
  const exchange = (turn) => service.post(`/sessions/${ID}/exchanges`, { ...turn, user_id: "ada.brandt" });
  await service.put("/users/ada.brandt/memory", { content: "# Ada Brandt\n\n- Moves from Leipzig to Porto with Jonas and their dog Miko.\n- Opens a ceramics workshop there.\n" });
  for (const [index, turn] of turns.entries()) {
    await exchange(turn);
    if (index === 20) await service.call("DELETE", `/sessions/${ID}/messages/14`);
    if (index === 30) await service.consolidate(ID);
  }
  await service.consolidate(ID);
  await exchange({ user_message: "Which kiln fits the budget?", assistant_reply: "The small one, with the costs of its connection." });
  await service.append(ID, [
    { role: "user", content: "Please check when it can be delivered." },
    { role: "assistant", content: null, tool_calls: [call("call_1", "delivery_dates", { article: "kiln, small" })] },
  ]);
}

async function takesScreenshots({ browser, service }) {
  await recordSession(service);
  const tab = await Tab.open(browser, service.url, { viewport: { width: 1200, height: 760 } });
  const save = (name) => tab.page.screenshot({ path: join(process.env.PRECIS_UI_SCREENSHOTS, name) });
  await tab.goto(`/sessions/${ID}/history`);
  await tab.page.getByRole("button", { name: /pending tool call$/ }).waitFor();
  await tab.see(/^Messages [0-9]+ to 108 of 108$/);
  await save("inspector-history.png");
  await tab.goto(`/sessions/${ID}/context`);
  await tab.fill("System prompt", "You are an assistant who helps Ada to plan her move.");
  await tab.fill("User message", "What did we decide about the kiln?");
  await tab.fill("Budget (max_tokens)", "2000");
  await tab.click("Build");
  await tab.see("% of 2,000");
  await tab.page.getByRole("heading", { name: "Tokens", exact: true }).evaluate((heading) => heading.scrollIntoView());
  await save("inspector-context.png");
  await tab.close();
}

export const tasks = [["take the screenshots", takesScreenshots]];
