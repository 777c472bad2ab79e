// A gateway's page for operators: fleet, tenants, keys, usage and experiments.

import { Chart } from "./admin-charts.js";
import { clock, count, duration, seconds, short } from "./admin-format.js";
import { History, ratio } from "./admin-history.js";
import { Poller } from "./admin-poll.js";
import { find, setState, showNotice, write } from "./admin-state.js";
import { Client } from "./client.js";
import { confirmed, el } from "./dom.js";
import { gatewayValues } from "./gateway-history.js";
import { KeyDialogs } from "./gateway-keys.js";
import { armsTable, backendsTable, keysTable, money, tenantsTable, usageTable } from "./gateway-tables.js";
import { askForKey, Keys } from "./key.js";
import { themeButton } from "./theme.js";

const PERIOD_MS = 2000;
const SLOW_EVERY = 5; // snapshots from one look at tenants, keys, usage and experiments to the next
const NEEDED = "This page is open only to holders of a key for /admin.";

const keys = new Keys("fovea-admin-key");
const client = new Client(keys, (reason) => askForKey(find("key-dialog"), keys, reason));
const history = new History(gatewayValues);
const poller = new Poller(onEvent, () => keys.value, PERIOD_MS);
const dialogs = new KeyDialogs(client,
  { key: find("edit-key"), secret: find("secret"), limits: find("edit-limits") }, () => loadKeys());
const shown = { keys: [], tenants: [], usage: null, currency: "", highest: 0 };
const currency = () => shown.currency;
const charts = [
  new Chart(find("chart-requests"), [
    { name: "answered", label: "answered", tone: 3 },
    { name: "refused", label: "refused", tone: 4 },
    { name: "failed", label: "failed", tone: 2 },
  ], short),
  new Chart(find("chart-load"), [
    { name: "running", label: "running", tone: 1 },
    { name: "waiting", label: "waiting", tone: 2 },
  ], short),
  new Chart(find("chart-times"), [
    { name: "seconds", label: "whole request", tone: 1 },
    { name: "waited", label: "in the queue", tone: 2 },
  ], seconds),
  new Chart(find("chart-tokens"), [
    { name: "prompt_tokens", label: "prompt", tone: 1 },
    { name: "visual_tokens", label: "of these visual", tone: 4 },
    { name: "completion_tokens", label: "answers", tone: 3 },
  ], short),
];
const tables = {
  backends: backendsTable(find("backends"), drain),
  tenants: tenantsTable(find("tenants"), currency, (name) => dialogs.limit(shown.tenants.find((row) => row.name === name))),
  keys: keysTable(find("keys"), {
    change: (fingerprint) => dialogs.change(shown.keys.find((row) => row.fingerprint === fingerprint)),
    revoke: async (fingerprint, name) => showProblem("keys", await dialogs.revoke(fingerprint, name)),
  }),
  usage: usageTable(find("usage"), currency, () => shown.highest),
};
const arms = new Map(); // by the name of an experiment: its card, its table and its latest verdicts
let since = null; // time of the last snapshot
let looks = 0;

function onEvent(event) {
  find("forget").hidden = !keys.value;
  if (event.kind === "snapshot") {
    since = event.snapshot.time;
    find("locked").hidden = true;
    showSnapshot(event.snapshot);
    if (looks % SLOW_EVERY === 0) loadAll();
    looks += 1;
    return;
  }
  if (event.kind === "locked") {
    looks = 0;
    setState("danger", "locked");
    showNotice("", "");
    find("board").hidden = true;
    find("locked").hidden = false;
    enterKey(event.code === "missing_api_key" ? NEEDED : `The gateway says: ${event.message}.`);
    return;
  }
  const until = since === null ? "" : ` since ${clock(since)}`;
  const [word, text] = event.kind === "refused" ? ["error", `The gateway answers with an error: ${event.message}.`]
    : ["unreachable", `The gateway has not answered${until}. This page keeps trying.`];
  setState("danger", word);
  showNotice("danger", text);
  find("board").classList.add("stale");
}

function showSnapshot(snapshot) {
  history.add(snapshot);
  shown.currency = snapshot.currency;
  const up = snapshot.backends.filter(({ accepts }) => accepts.text === "yes").length;
  const [tone, word] = snapshot.draining ? ["warn", "draining"] : up ? ["ok", "ready"] : ["danger", "no backend"];
  setState(tone, word);
  showNotice("warn", notices(snapshot, up).join(" "));
  find("board").hidden = false;
  find("board").classList.remove("stale");
  write("facts", facts(snapshot).join(" · "));
  showTiles(snapshot, up);
  for (const chart of charts) chart.draw(history.points);
  tables.backends.render(snapshot.backends);
}

function notices(snapshot, up) {
  return [
    ...(snapshot.draining ? ["The gateway is draining: it finishes running requests and refuses new ones."] : []),
    ...(up ? [] : ["No backend accepts requests."]),
    ...(snapshot.accounts_failing ? ["The store of the accounts fails. The gateway's log says why."] : []),
    ...(snapshot.keys_file_broken ? ["The keys file cannot be used, so the keys stay what they were. The log says why."] : []),
  ];
}

function facts({ models, version, uptime_seconds: uptime, workers, worker }) {
  const which = workers > 1 ? [`load and backends as worker ${worker} of ${workers} workers sees them`] : [];
  return [models.length === 1 ? models[0] : `${count(models.length)} models`, `Fovea ${version}`, `up ${duration(uptime)}`, ...which];
}

function showTiles({ backends, running, waiting, totals }, up) {
  write("tile-backends", `${up} of ${backends.length}`);
  write("note-backends", `${backends.filter((each) => each.draining).length} drained or draining`);
  write("tile-running", count(running));
  write("note-running", `${count(waiting)} waiting`);
  write("tile-requests", count(totals.answered));
  write("note-requests", `${count(totals.refused)} refused`);
  write("tile-failed", count(totals.failed));
  write("note-failed", `${count(totals.retries)} retries`);
  write("tile-seconds", seconds(ratio(totals.request_seconds, totals.request_count)));
  write("note-seconds", totals.waiting_count ? `${seconds(totals.waiting_seconds / totals.waiting_count)} in the queue` : "");
  write("tile-cost", money(totals.cost, shown.currency));
  write("note-cost", `${count(totals.cache_hits)} cached answers`);
}

async function loadAll() {
  await Promise.all([loadKeys(), loadUsage(), loadExperiments()]);
}

// Ask for something, and show it in its section, or what went wrong.
async function load(section, path, show) {
  try {
    show(await (await client.request(path, { cache: "no-store" })).json());
    showProblem(section, null);
  } catch (error) {
    showProblem(section, error);
  }
}

async function loadKeys() {
  await Promise.all([
    load("keys", "admin/keys", (answer) => {
      shown.keys = answer.keys;
      dialogs.describe(answer);
      find("new-key").hidden = !answer.writable;
      write("keys-note", answer.writable ? more(answer.keys, answer.total) : "the gateway cannot write its keys file; keys are changed where it is started");
      tables.keys.render(answer.keys);
    }),
    load("tenants", "admin/tenants", (answer) => {
      shown.tenants = answer.tenants;
      write("tenants-note", answer.problem ?? more(answer.tenants, answer.total));
      tables.tenants.render(answer.tenants);
    }),
  ]);
}

async function loadUsage() {
  const by = find("usage-by").value;
  const query = new URLSearchParams({ by, days: find("usage-days").value });
  await load("usage", `admin/usage?${query}`, ({ recorded, rows, total, currency: unit }) => {
    find("usage").querySelector("thead th").textContent = find("usage-by").selectedOptions[0].text;
    if (recorded) shown.currency = unit;
    shown.highest = Math.max(0, ...rows.map(({ cost }) => cost));
    const named = rows.map((row) => ({ ...row, group: row[by] }));
    tables.usage.render(by === "day" ? named.reverse() : named.sort((a, b) => b.cost - a.cost || b.requests - a.requests));
    write("usage-empty", recorded ? "Nothing was used in this time." : "No usage is recorded: start the gateway with --usage-file.");
    write("usage-total", total && rows.length ? `together ${count(total.requests)} requests, ${money(total.cost, unit)}` : "");
  });
}

async function loadExperiments() {
  await load("experiments", "admin/experiments", ({ experiments }) => {
    for (const [name, { card }] of arms) {
      if (!experiments.some((each) => each.name === name)) {
        card.remove();
        arms.delete(name);
      }
    }
    for (const each of experiments) showExperiment(each);
    find("no-experiments").hidden = experiments.length > 0;
  });
}

function showExperiment({ name, model, state, reason, promoted, variants, verdicts }) {
  if (!arms.has(name)) {
    const table = el("table");
    const note = el("p", { class: "muted small" });
    const chip = el("span", { class: "chip" });
    const card = el("div", { class: "experiment" }, el("div", { class: "title" }, el("h3", { text: name }), chip), note,
      el("div", { class: "scroll-x", role: "region", tabindex: "0", "aria-label": `Arms of ${name}, table` }, table,
        el("p", { class: "empty muted", "data-empty": true, text: "It has no arms." })));
    find("experiment-list").append(card);
    const entry = { card, note, chip, verdicts: [] };
    entry.table = armsTable(table, currency, () => entry.verdicts);
    arms.set(name, entry);
  }
  const entry = arms.get(name);
  entry.verdicts = verdicts;
  entry.chip.className = `chip ${state === "active" ? "ok" : "warn"}`;
  entry.chip.textContent = promoted ? `promoted: ${promoted}` : state.replaceAll("_", " ");
  entry.note.textContent = [`model ${model}`, ...(reason ? [reason] : [])].join(" · ");
  entry.table.render(variants);
}

// Do something with the fleet, and show what came of it. describe: makes a sentence of the answer.
async function act(path, describe) {
  try {
    const answer = await (await client.request(path, { method: "POST" })).json();
    showProblem("fleet", null);
    write("fleet-note", describe(answer));
    poller.start();
  } catch (error) {
    write("fleet-note", "");
    showProblem("fleet", error);
  }
}

function drain(name, wanted) {
  const path = name.split("/").map(encodeURIComponent).join("/");
  return act(`admin/backends/${path}/${wanted ? "drain" : "undrain"}`,
    () => (wanted ? `${name} gets no new requests.` : `${name} gets requests again, few at first.`));
}

function showProblem(section, error) {
  const notice = find(`${section}-problem`);
  notice.hidden = !error;
  const text = error ? error.message : "";
  if (notice.textContent !== text) notice.textContent = text;
}

function more(rows, total) {
  return total > rows.length ? `${count(rows.length)} of ${count(total)}` : count(total);
}

async function enterKey(reason) {
  if (await askForKey(find("key-dialog"), keys, reason)) poller.start();
}

find("unlock").addEventListener("click", () => enterKey(NEEDED));
find("forget").addEventListener("click", () => {
  keys.value = "";
  poller.start();
});
find("new-key").addEventListener("click", () => dialogs.create());
find("reload").addEventListener("click", () => act("admin/reload", ({ reloaded }) => reloaded));
find("clear-cache").addEventListener("click", async () => {
  if (!(await confirmed("Remove all cached answers of this gateway?", "Remove"))) return;
  await act("admin/cache/clear", ({ removed }) => `${count(removed)} cached answers were removed.`);
});
for (const id of ["usage-by", "usage-days"]) find(id).addEventListener("change", loadUsage);
themeButton(find("theme"));
poller.start();
