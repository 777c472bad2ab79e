// The visual-token budget: what a share of the tokens saved and lost where it was measured.

// figures: the content of budget.json. Returns sentences about a method and a share, without guessing between
// measured shares.
export function describeBudget(figures, method, keep) {
  if (keep >= 1) return ["All visual tokens are kept: nothing is saved and nothing is lost."];
  const shares = Object.keys(figures.methods[method]).map(Number).sort((a, b) => a - b);
  const below = shares.filter((share) => share <= keep).at(-1);
  const above = shares.find((share) => share >= keep);
  const lines = [];
  if (below === undefined) lines.push(`Fewer than ${percent(shares[0])} were not measured.`);
  if (below !== undefined) lines.push(measured(figures, method, below));
  if (above !== undefined && above !== below) lines.push(measured(figures, method, above));
  return lines;
}

function measured(figures, method, share) {
  const { all, small_details: details, ttft_ms: ttft } = figures.methods[method][share];
  const { full } = figures;
  return `At ${percent(share)}: accuracy ${signed(all - full.all)} points (${all} % of answers right, ` +
    `${full.all} % with all tokens), small details ${signed(details - full.small_details)}; ` +
    `first token after ${Math.round(ttft)} ms in place of ${Math.round(full.ttft_ms)} ms.`;
}

export function percent(share) {
  return `${Math.round(100 * share)} %`;
}

function signed(points) {
  const text = Math.abs(points).toFixed(1);
  if (text === "0.0") return "±0.0";
  return `${points < 0 ? "−" : "+"}${text}`;
}
