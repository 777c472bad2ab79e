// One image in a dialog, with zoom, the heat map of relevance, and the regions with their numbers of tokens.

import { el, iconButton } from "./dom.js";
import { heatMap, numbered, pointing, regionBoxes, regionWords } from "./overlay.js";

const ZOOMS = [0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8];
const LOOKS = [
  "The model did not look for what your question is about.",
  "The model looked once at a small view with your question.",
];
const HINT = "Point at a region, or reach it with the Tab key, to read why it got tokens.";

export class Viewer {
  // dialog: an empty <dialog>.
  constructor(dialog) {
    this.dialog = dialog;
    dialog.addEventListener("keydown", (event) => this.onKey(event));
    dialog.addEventListener("close", () => dialog.replaceChildren());
    addEventListener("resize", () => { if (this.dialog.open && this.fitting) this.fit(); });
  }

  // item: {name, width, height}. url: of its bytes. use: its entry of `fovea.images`, or null.
  show(item, url, use) {
    this.item = item;
    const relevance = use?.relevance;
    this.shown = relevance ? numbered(relevance.regions) : [];
    this.stage = el("div", { class: "stage" }, el("img", { src: url, alt: item.name, draggable: "false" }));
    this.scroller = el("div", { class: "scroller", tabindex: "0", role: "group", "aria-label": "Image" }, this.stage);
    this.percent = el("output", { class: "number zoom", "aria-live": "polite" });
    this.dialog.replaceChildren(
      el("div", { class: "viewer-bar" },
        el("h2", { text: item.name }),
        el("span", { class: "muted small number", text: `${item.width} × ${item.height}` }),
        el("span", { class: "spring" }),
        ...(relevance ? this.toggles() : []),
        el("div", { class: "row zooms", role: "group", "aria-label": "Zoom" },
          iconButton("zoomOut", "Zoom out", () => this.step(-1)), this.percent,
          iconButton("zoomIn", "Zoom in", () => this.step(1)),
          el("button", { type: "button", text: "Fit", onclick: () => this.fit() })),
        iconButton("close", "Close", () => this.dialog.close())),
      el("div", { class: "viewer-body" },
        el("div", { class: "viewer-main" }, this.scroller, relevance ? this.words() : null),
        relevance ? this.details(use) : null));
    if (relevance) {
      this.stage.append(heatMap(relevance.map), regionBoxes(relevance, (index, on) => this.mark(index, on)));
    }
    this.dialog.setAttribute("aria-label", item.name);
    this.dialog.showModal();
    this.scroller.focus();
    this.fit();
  }

  toggles() {
    const toggle = (label, layer) => {
      const button = el("button", { type: "button", "aria-pressed": "true", text: label, onclick: () => {
        const shown = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(shown));
        this.stage.querySelector(layer).hidden = !shown;
      } });
      return button;
    };
    return [toggle("Heat map", ".heat"), toggle("Regions", ".regions")];
  }

  details(use) {
    const { relevance } = use;
    const shown = this.shown;
    const row = (region) => el("tr", {
      tabindex: "0", "data-row": region.index, ...pointing(region.index, (index, on) => this.mark(index, on)),
    },
      el("th", { class: "number", scope: "row", text: String(region.number) }),
      el("td", { class: "why", text: region.why ?? "" }),
      el("td", { class: "number", text: `${region.tokens} of ${region.of}` }),
      el("td", { class: "number", text: `${Math.round(100 * region.lod)} %` }),
      el("td", { class: "number", text: region.relevance.toFixed(2) }));
    const note = shown.length ? null : el("p", {
      class: "small muted", text: "No region was encoded on its own: tokens of the whole image were selected.",
    });
    const without = relevance.regions.length - shown.length;
    const rest = without === 1 ? "1 more region is" : `${without} more regions are`;
    return el("aside", { class: "viewer-side", "aria-label": "Regions" },
      el("p", {}, el("strong", { class: "number", text: `${use.visual_tokens} of ${use.of}` }), " visual tokens"),
      el("p", { class: "small muted", text: `${relevance.thumbnail_tokens} show the whole image; ` +
        `${relevance.grid[0]} × ${relevance.grid[1]} cells; decided in ${relevance.allocation_ms} ms.` }),
      LOOKS[relevance.looks] ? el("p", { class: "small muted", text: LOOKS[relevance.looks] }) : null,
      note ?? el("table", {},
        el("caption", { text: "Regions" }),
        el("thead", {}, el("tr", {}, ["No.", "Why", "Tokens", "Resolution", "Relevance"].map(
          (text) => el("th", { class: text === "Why" ? "why" : "number", scope: "col", text })))),
        el("tbody", {}, shown.map(row))),
      shown.length && without && relevance.thumbnail_tokens ? el("p", {
        class: "small muted", text: `${rest} only in the small view of the whole.`,
      }) : null,
      el("ul", { class: "legend small muted" },
        el("li", {}, el("span", { class: "swatch native" }), "encoded at native resolution"),
        el("li", {}, el("span", { class: "swatch lower" }), "encoded at a lower one"),
        el("li", {}, el("span", { class: "swatch warm" }), "warm cells matter for the question")));
  }

  // The line below the image with the facts about the region that is pointed at or focused.
  words() {
    this.line = el("p", { class: "region-words small", text: this.shown.length ? HINT : "" });
    return this.line;
  }

  mark(index, on) {
    // The pointer may rest on one region while the keyboard is at another: the last one counts.
    for (const each of this.dialog.querySelectorAll("[data-region], [data-row]")) {
      const { region, row } = each.dataset;
      each.classList.toggle("marked", on && String(index) === (region ?? row));
    }
    this.line.textContent = on ? regionWords(this.shown.find((region) => region.index === index)) : HINT;
  }

  fit() {
    const { clientWidth, clientHeight } = this.scroller;
    const scale = Math.min((clientWidth - 24) / this.item.width, (clientHeight - 24) / this.item.height);
    this.zoomTo(Math.max(0.02, Math.min(8, scale)));
    this.fitting = true;
  }

  step(direction) {
    const beyond = direction > 0 ? ZOOMS.find((zoom) => zoom > this.zoom + 0.001)
      : ZOOMS.findLast((zoom) => zoom < this.zoom - 0.001);
    if (beyond) this.zoomTo(beyond);
  }

  zoomTo(zoom) {
    this.zoom = zoom;
    this.fitting = false;
    this.stage.style.width = `${this.item.width * zoom}px`;
    this.stage.style.height = `${this.item.height * zoom}px`;
    this.percent.textContent = `${Math.round(100 * zoom)} %`;
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const action = { "+": () => this.step(1), "=": () => this.step(1), "-": () => this.step(-1), 0: () => this.fit() };
    if (action[event.key]) {
      action[event.key]();
      event.preventDefault();
    }
  }
}

// A thumbnail that opens the viewer. Its heat map and regions are those of one answer.
export function thumbnail(viewer, item, url, use) {
  const relevance = use?.relevance;
  const frame = el("span", { class: "frame" }, el("img", { src: url, alt: "" }));
  if (relevance) frame.append(heatMap(relevance.map), regionBoxes(relevance, null));
  const tokens = use ? `, ${use.visual_tokens} visual tokens` : "";
  return el("button", {
    type: "button", class: "thumb", "aria-label": `Open ${item.name}${tokens}`, title: item.name,
    onclick: () => viewer.show(item, url, use),
  }, frame);
}

export function videoView(item, url) {
  return el("video", { class: "thumb", src: url, controls: true, muted: true, preload: "metadata",
    "aria-label": item.name });
}

