// Asks /admin/live again and again while the page is visible.

const LONGEST_MS = 10000;
const PATIENCE_MS = 8000;

/**
 * The poller.
 * onEvent gets one of
 *   {kind: "snapshot", snapshot}
 *   {kind: "locked", message, code}   the key is missing or wrong; it asks again after `start`
 *   {kind: "refused", message}        the server answers, with an error
 *   {kind: "unreachable", retryMs}    the server does not answer
 * key: returns the admin key, or "".
 * periodMs: milliseconds from one question to the next.
 */
export class Poller {
  constructor(onEvent, key, periodMs = 1000) {
    this.onEvent = onEvent;
    this.key = key;
    this.periodMs = periodMs;
    this.timer = null;
    this.asking = null;
    this.running = false;
    this.failures = 0;
    document.addEventListener("visibilitychange", () => this.wake());
  }

  /** Ask now, and again after every period. */
  start() {
    this.running = true;
    this.failures = 0;
    this.wake();
  }

  stop() {
    this.running = false;
    this.wake();
  }

  wake() {
    clearTimeout(this.timer);
    if (this.asking) this.asking.abort();
    this.asking = null;
    if (this.running && !document.hidden) this.ask();
  }

  async ask() {
    const asking = new AbortController();
    this.asking = asking;
    const started = performance.now();
    const patience = setTimeout(() => asking.abort("timeout"), PATIENCE_MS);
    let event;
    try {
      event = await this.fetch(asking.signal);
    } catch {
      event = { kind: "unreachable" };
    } finally {
      clearTimeout(patience);
    }
    if (this.asking !== asking) return; // another call has replaced this one, or the page is hidden
    this.asking = null;
    this.failures = event.kind === "unreachable" ? this.failures + 1 : 0;
    const wait = Math.min(LONGEST_MS, this.periodMs * 2 ** Math.min(this.failures, 6));
    if (event.kind === "unreachable") event.retryMs = wait;
    if (event.kind === "locked") this.running = false;
    else {
      const next = event.kind === "unreachable" ? wait : this.periodMs - (performance.now() - started);
      this.timer = setTimeout(() => this.ask(), Math.max(next, this.periodMs / 4));
    }
    this.onEvent(event);
  }

  async fetch(signal) {
    const key = this.key();
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const answer = await fetch("admin/live", { headers, signal, cache: "no-store", credentials: "omit" });
    if (answer.ok) return { kind: "snapshot", snapshot: await answer.json() };
    const body = await answer.json().catch(() => null);
    const message = body?.error?.message ?? `status ${answer.status}`;
    const kind = answer.status === 401 || answer.status === 403 ? "locked" : "refused";
    return { kind, message, code: body?.error?.code };
  }
}
