// The panels beside the conversation. On narrow windows they lie over it, one at a time.

const WIDE = { sidebar: 860, options: 1180 };

export function panels() {
  const entries = Object.entries(WIDE).map(([id, width]) => {
    const panel = document.querySelector(`#${id}`);
    const button = document.querySelector(`[aria-controls="${id}"]`);
    const wide = matchMedia(`(min-width: ${width}px)`);
    const entry = { panel, button, wide, set: (open) => {
      panel.hidden = !open;
      button.setAttribute("aria-expanded", String(open));
    } };
    button.addEventListener("click", () => {
      const open = panel.hidden;
      if (open) for (const other of entries) if (other !== entry && !other.wide.matches) other.set(false);
      entry.set(open);
      if (open && !wide.matches) panel.querySelector("button, a, input, select, textarea")?.focus();
    });
    wide.addEventListener("change", () => entry.set(wide.matches));
    entry.set(wide.matches);
    return entry;
  });
  const closeNarrow = () => {
    const open = entries.filter(({ panel, wide }) => !panel.hidden && !wide.matches);
    for (const entry of open) { entry.set(false); entry.button.focus(); }
    return open.length > 0;
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]") && closeNarrow()) event.preventDefault();
  }, true);
  document.querySelector("#scroll").addEventListener("pointerdown", closeNarrow);
  document.querySelector("#conversations").addEventListener("click", (event) => {
    if (event.target.closest("a")) closeNarrow();
  });
}
