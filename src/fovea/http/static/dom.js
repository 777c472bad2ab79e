// Elements of the document. Text only ever becomes text nodes: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

// Create an element. props: attributes; "class", "text", on* listeners and booleans are understood.
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const ICONS = {
  plus: "M12 5v14M5 12h14",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15.5 9.5h.01",
  camera: "M4 8h3l2-3h6l2 3h3v11H4zM12 10a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7z",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  close: "M6 6l12 12M18 6L6 18",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v5M14 11v5",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M19 12a7 7 0 1 1-2-5l2 2M19 4v5h-5",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
  menu: "M4 7h16M4 12h16M4 17h16",
  sliders: "M4 8h9M17 8h3M4 16h3M11 16h9M15 6v4M9 14v4",
  zoomIn: "M12 7v10M7 12h10",
  zoomOut: "M7 12h10",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  video: "M4 6h11v12H4zM15 10l5-3v10l-5-3z",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({
    viewBox: "0 0 24 24", fill: "none", stroke: "currentColor", "stroke-width": "1.8",
    "stroke-linecap": "round", "stroke-linejoin": "round", "aria-hidden": "true",
  })) svg.setAttribute(key, value);
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

// A button with an icon and a name for screen readers.
export function iconButton(name, label, onclick, kind = "quiet") {
  return el("button", { type: "button", class: `icon ${kind}`, "aria-label": label, title: label, onclick },
    icon(name));
}

// Ask a question in a dialog. Resolves with true if the user agrees.
export function confirmed(question, verb) {
  return new Promise((resolve) => {
    const dialog = el("dialog", { "aria-label": question });
    const finish = (answer) => { dialog.remove(); resolve(answer); };
    dialog.append(
      el("p", { text: question }),
      el("div", { class: "row end" },
        el("button", { type: "button", text: "Cancel", onclick: () => finish(false) }),
        el("button", { type: "button", class: "danger", text: verb, onclick: () => finish(true) })));
    dialog.addEventListener("close", () => finish(false));
    document.body.append(dialog);
    dialog.showModal();
  });
}

// Save bytes as a file of the user.
export function download(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

// A new name of 128 random bits. crypto.randomUUID is missing on pages without TLS.
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function milliseconds(value) {
  if (value >= 10_000) return `${(value / 1000).toFixed(0)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return value >= 10 ? `${value.toFixed(0)} ms` : `${value.toFixed(1)} ms`;
}
