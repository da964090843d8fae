// Performs tasks in the inspector as a person would, in Chromium against a running service.
//
//     node tests/ui/run.mjs [TASK…]    runs all tasks, or those whose names contain one of the words
//
// PRECIS_URL is a service without keys. PRECIS_KEYED_URL is one that needs PRECIS_KEY, or PRECIS_READ_KEY to read, and whose model
// fails. PRECIS_UI_NODE and PRECIS_UI_CHROMIUM come from scripts/ui, and pictures go to the folder PRECIS_UI_SCREENSHOTS. To add a
// task, add it to the list of its file, or a file to TASKS.

import { launch, Tab } from "./browser.mjs";
import { tasks as accessTasks } from "./access.mjs";
import { tasks as contextTasks } from "./context.mjs";
import { tasks as historyTasks } from "./history.mjs";
import { tasks as sessionTasks } from "./sessions.mjs";
import { tasks as memoryTasks } from "./memory.mjs";
import { tasks as modelTasks } from "./models.mjs";
import { tasks as screenshotTasks } from "./screenshots.mjs";
import { tasks as summaryTasks } from "./summaries.mjs";
import { recordHostileSession, recordLargeSession, Service } from "./service.mjs";

const TASKS = [...sessionTasks, ...historyTasks, ...contextTasks, ...summaryTasks, ...memoryTasks, ...modelTasks, ...accessTasks, ...screenshotTasks];

const service = new Service(process.env.PRECIS_URL);
const keyed = new Service(process.env.PRECIS_KEYED_URL, process.env.PRECIS_KEY);
const words = process.argv.slice(2);
const chosen = TASKS.filter(([name]) => words.length === 0 || words.some((word) => name.includes(word)));
if (chosen.length === 0) throw new Error("no task has such a name");

const started = performance.now();
const seconds = () => ((performance.now() - started) / 1000).toFixed(1);
await recordLargeSession(service, "large");
await recordHostileSession(service);
console.log(`${seconds()} s: sessions recorded`);
const browser = await launch();
for (const [name, run] of chosen) {
  try {
    await run({ browser, service, keyed });
    console.log(`${seconds()} s: ${name}`);
  } catch (error) {
    process.exitCode = 1;
    console.error(`${seconds()} s: FAILED: ${name}\n`, error);
    await Tab.latest?.describe();
  }
}
await browser.close();
