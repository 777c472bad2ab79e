// The last five minutes of snapshots, as series of points. Counters become rates here.

/** Seconds that charts show. */
export const SPAN_S = 300;
/** Seconds between two snapshots after which a line is interrupted. */
export const GAP_S = 5;

const HIT_RATES = ["decoded", "pixels", "encoder", "kv"];

/**
 * Points in time. A point is {time, values}; a value is a number, or null if there is none for that time.
 * A server that has started again has smaller counters, and no rate is computed across its start.
 */
export class History {
  // valuesOf: makes the values of a point of the snapshot before it (or null) and of its own.
  constructor(valuesOf = values) {
    this.valuesOf = valuesOf;
    this.points = [];
    this.last = null;
  }

  /** Add a snapshot of /admin/live. Returns its point. */
  add(snapshot) {
    const before = this.last;
    this.last = snapshot;
    const fresh = before !== null && snapshot.time > before.time
      && snapshot.uptime_seconds >= before.uptime_seconds ? before : null;
    const point = { time: snapshot.time, values: this.valuesOf(fresh, snapshot) };
    this.points.push(point);
    const oldest = snapshot.time - SPAN_S;
    while (this.points[0].time < oldest) this.points.shift();
    return point;
  }
}

/** The values of one point. before: the snapshot before it, or null. */
export function values(before, now) {
  const found = {
    running: now.queue.running,
    waiting: now.queue.waiting,
    loading: now.queue.loading,
    generated: null,
    computed: null,
    ttft: null,
    ttft_p95: now.first_token.p95_seconds,
  };
  for (const name of HIT_RATES) found[`hits_${name}`] = null;
  if (before === null) return found;
  const elapsed = now.time - before.time;
  found.generated = rate(before.counters.generated_tokens, now.counters.generated_tokens, elapsed);
  found.computed = rate(before.counters.computed_tokens, now.counters.computed_tokens, elapsed);
  found.ttft = ratio(
    now.first_token.sum_seconds - before.first_token.sum_seconds,
    now.first_token.count - before.first_token.count,
  );
  for (const name of HIT_RATES) {
    const old = before.caches.find((row) => row.name === name);
    const row = now.caches.find((cache) => cache.name === name);
    if (old && row) {
      const hits = row.hits - old.hits;
      found[`hits_${name}`] = ratio(hits, hits + row.misses - old.misses);
    }
  }
  return found;
}

/** The hit rate of a cache since the start of the server; null if it was never asked. */
export function hitRate(row) {
  return row.hits == null || row.misses == null ? null : ratio(row.hits, row.hits + row.misses);
}

export function rate(before, now, elapsed) {
  return now < before ? null : (now - before) / elapsed;
}

export function ratio(part, whole) {
  return whole > 0 && part >= 0 ? part / whole : null;
}
