// What the charts of a gateway show of two snapshots of /admin/live. Sums are those of all workers.

import { rate, ratio } from "./admin-history.js";

const RATES = ["answered", "refused", "failed", "prompt_tokens", "visual_tokens", "completion_tokens"];

/** The values of one point. before: the snapshot before it, or null. */
export function gatewayValues(before, now) {
  const found = { running: now.running, waiting: now.waiting, seconds: null, waited: null };
  for (const name of RATES) found[name] = null;
  if (before === null) return found;
  const [old, sums, elapsed] = [before.totals, now.totals, now.time - before.time];
  for (const name of RATES) found[name] = rate(old[name], sums[name], elapsed);
  found.seconds = ratio(sums.request_seconds - old.request_seconds, sums.request_count - old.request_count);
  found.waited = ratio(sums.waiting_seconds - old.waiting_seconds, sums.waiting_count - old.waiting_count);
  return found;
}
