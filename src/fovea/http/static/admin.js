// The page for operators: live queues, caches, tenants and slow requests.

import { clock, count, duration, percent, seconds, short, bytes } from "./admin-format.js";
import { Chart } from "./admin-charts.js";
import { History } from "./admin-history.js";
import { Poller } from "./admin-poll.js";
import { find, setState, showNotice, write } from "./admin-state.js";
import { cachesTable, requestsTable, slowTable, stageLegend, tenantsTable } from "./admin-tables.js";
import { askForKey, Keys } from "./key.js";
import { themeButton } from "./theme.js";

const RATES_OVER = 5; // snapshots over which the figure of a rate is a mean
const FEW_SLOW = 8; // slow requests that are shown at first
const NEEDED = "The server's figures are open only to holders of a key for /admin.";

const keys = new Keys("fovea-admin-key");
const history = new History();
const charts = [
  new Chart(find("chart-queue"), [
    { name: "running", label: "running", tone: 1 },
    { name: "waiting", label: "waiting", tone: 2 },
    { name: "loading", label: "loading images", tone: 4 },
  ], short),
  new Chart(find("chart-tokens"), [
    { name: "generated", label: "generated", tone: 3 },
    { name: "computed", label: "computed", tone: 1 },
  ], short),
  new Chart(find("chart-ttft"), [
    { name: "ttft", label: "mean", tone: 1 },
    { name: "ttft_p95", label: "95 % of the last minute", tone: 2 },
  ], seconds),
  new Chart(find("chart-hits"), [
    { name: "hits_kv", label: "prefix", tone: 1 },
    { name: "hits_encoder", label: "encoder", tone: 2 },
    { name: "hits_pixels", label: "pixels", tone: 3 },
    { name: "hits_decoded", label: "decoded", tone: 4 },
  ], percent, 1),
];
const tables = {
  requests: requestsTable(find("requests")),
  caches: cachesTable(find("caches")),
  tenants: tenantsTable(find("tenants")),
  slow: slowTable(find("slow")),
};
const poller = new Poller(onEvent, () => keys.value);
let since = null; // time of the last snapshot, while the server does not answer

function onEvent(event) {
  if (event.kind === "snapshot") {
    since = event.snapshot.time;
    find("locked").hidden = true;
    showState(event.snapshot.engine);
    showBoard(event.snapshot);
  } else if (event.kind === "locked") {
    setState("danger", "locked");
    showNotice("", "");
    find("board").hidden = true;
    find("locked").hidden = false;
    enterKey(event.code === "missing_api_key" ? NEEDED : `The server says: ${event.message}.`);
  } else if (event.kind === "refused") {
    setState("danger", "error");
    showNotice("danger", `The server answers with an error: ${event.message}.`);
    find("board").classList.add("stale");
  } else {
    const until = since === null ? "" : ` since ${clock(since)}`;
    setState("danger", "unreachable");
    showNotice("danger", `The server has not answered${until}. This page keeps trying.`);
    find("board").classList.add("stale");
  }
  find("forget").hidden = !keys.value;
}

/** Show the state of the server. A message appears only when it changes, so that it is read out once. */
function showState(engine) {
  const notices = {
    ready: ["ok", "ready", ""],
    loading: ["warn", "loading", "The model is still loading. Requests are refused until it is ready."],
    draining: ["warn", "draining", "The server is draining: it finishes running requests and refuses new ones."],
    stopped: ["danger", "stopped", "The engine has stopped. The server's log says why."],
  };
  const [tone, word, notice] = notices[engine.status] ?? ["warn", engine.status, engine.reason ?? ""];
  setState(tone, word);
  showNotice(tone, notice);
}

function showBoard(snapshot) {
  history.add(snapshot);
  const { engine, counters, memory } = snapshot;
  const board = find("board");
  board.hidden = false;
  board.classList.remove("stale");
  write("model", engine.model);
  write("facts", facts(snapshot).join(" · "));
  showTiles(snapshot);
  for (const chart of charts) chart.draw(history.points);
  tables.requests.render(snapshot.requests.rows);
  write("requests-note", more(snapshot.requests));
  tables.caches.render(snapshot.caches);
  tables.tenants.render(snapshot.tenants.rows);
  write("tenants-note", more(snapshot.tenants));
  showSlow();
  write("foot", [
    `${count(counters.steps)} steps`,
    `${count(counters.images_encoded)} images encoded`,
    `${count(counters.preemptions)} preemptions`,
    `${count(counters.failed_steps)} failed steps`,
    `${count(counters.integrity_errors)} integrity errors`,
    `request bodies ${bytes(memory.body_bytes)} of ${bytes(memory.body_capacity_bytes)}`,
    `media in flight ${bytes(memory.media_held_bytes)} of ${bytes(memory.media_held_capacity_bytes)}`,
  ].join(" · "));
}

function facts({ engine, uptime_seconds: uptime }) {
  const device = engine.device === "none" ? [] : [`${engine.dtype} on ${engine.device}`];
  const loaded = [engine.architecture, ...device, `context ${count(engine.max_context)}`];
  return [...(engine.status === "loading" ? [] : loaded), `Fovea ${engine.version}`, `up ${duration(uptime)}`];
}

function showTiles({ engine, queue, connections, first_token: first }) {
  write("tile-running", count(queue.running));
  write("note-running", engine.max_running ? `of at most ${count(engine.max_running)}` : "");
  write("tile-waiting", count(queue.waiting));
  write("note-waiting", `${count(queue.waiting_image)} for an image, ${count(queue.loading)} loading`);
  write("tile-oldest", queue.waiting ? seconds(queue.oldest_seconds) : "–");
  write("note-oldest", queue.waiting_image ? `for an image: ${seconds(queue.oldest_image_seconds)}` : "");
  write("tile-tokens", short(recent("generated")));
  write("note-tokens", `${short(recent("computed"))} computed`);
  write("tile-ttft", seconds(first.p95_seconds));
  write("note-ttft", first.p50_seconds == null ? "none in the last minute" : `half within ${seconds(first.p50_seconds)}`);
  write("tile-connections", count(connections.open));
  write("note-connections", `${count(connections.idle)} idle, at most ${count(connections.capacity)}`);
}

/** Show the slowest requests: a few, or all that the snapshot has. */
function showSlow() {
  const rows = history.last.slow;
  const all = find("more").getAttribute("aria-expanded") === "true";
  tables.slow.render(all ? rows : rows.slice(0, FEW_SLOW));
  find("stages").hidden = rows.length === 0;
  find("more").hidden = rows.length <= FEW_SLOW;
  write("more", all ? `Show the slowest ${FEW_SLOW}` : `Show all ${rows.length}`);
}

/** The mean of a rate over the last seconds; null without any. */
function recent(name) {
  const found = history.points.slice(-RATES_OVER).map((point) => point.values[name]).filter((value) => value != null);
  return found.length ? found.reduce((sum, value) => sum + value, 0) / found.length : null;
}

/** Tell how many rows a table leaves out. */
function more({ total, rows }) {
  return total > rows.length ? `${count(rows.length)} of ${count(total)}` : total ? count(total) : "";
}

async function enterKey(reason) {
  if (await askForKey(find("key-dialog"), keys, reason)) poller.start();
}

find("unlock").addEventListener("click", () => enterKey(NEEDED));
find("forget").addEventListener("click", () => {
  keys.value = "";
  poller.start();
});
find("pause").addEventListener("click", (event) => {
  const paused = event.currentTarget.getAttribute("aria-pressed") !== "true";
  event.currentTarget.setAttribute("aria-pressed", String(paused));
  if (paused) {
    poller.stop();
    setState("warn", "paused");
  } else poller.start();
});
find("more").addEventListener("click", ({ currentTarget: button }) => {
  button.setAttribute("aria-expanded", String(button.getAttribute("aria-expanded") !== "true"));
  showSlow();
});
stageLegend(find("stages"));
themeButton(find("theme"));
poller.start();
