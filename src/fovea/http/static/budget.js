// The visual-token budget: what a share of the tokens saved and lost where it was measured.

// figures: the content of budget.json. Returns {note, measured}: a sentence, and for the measured shares beside
// `keep` what they saved and lost: {share, label, time, accuracy}. Nothing is guessed between measured shares.
export function describeBudget(figures, method, keep) {
  if (keep >= 1) return { note: "All visual tokens are kept: nothing is saved and nothing is lost.", measured: [] };
  const shares = Object.keys(figures.methods[method]).map(Number).sort((a, b) => a - b);
  const below = shares.filter((share) => share <= keep).at(-1);
  const above = shares.find((share) => share >= keep);
  const near = [...new Set([below, above])].filter((share) => share !== undefined);
  return {
    note: below === undefined ? `Fewer than ${percent(shares[0])} were not measured.` : "",
    measured: near.map((share) => effect(figures, method, share)),
  };
}

function effect(figures, method, share) {
  const { full } = figures;
  const row = figures.methods[method][share];
  const [ms, allMs] = [Math.round(row.ttft_ms), Math.round(full.ttft_ms)];
  return {
    share,
    label: ms <= allMs ? "Saves" : "Costs",
    time: `${Math.abs(allMs - ms)} ms to the first token (${ms} ms, not ${allMs} ms)`,
    accuracy: `${signed(row.all - full.all)} points (${row.all.toFixed(1)}\u00a0%, not ${full.all.toFixed(1)}); ` +
      `${signed(row.small_details - full.small_details)} in small details`,
  };
}

export function percent(share) {
  return `${Math.round(100 * share)}\u00a0%`;
}

function signed(points) {
  const text = Math.abs(points).toFixed(1);
  if (text === "0.0") return "±0.0";
  return `${points < 0 ? "−" : "+"}${text}`;
}
