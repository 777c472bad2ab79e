// What the server says about an image, laid over the image: relevance of the cells, and boxes of the regions.
// All positions are shares of the image's sides, so they hold at every zoom.

import { el } from "./dom.js";

const COLOURS = [[16, 24, 64], [62, 58, 138], [150, 60, 120], [224, 92, 70], [250, 170, 60], [253, 236, 150]];

// The colour of a relevance from 0 to 1, as [red, green, blue].
export function heatColour(value) {
  const place = Math.min(1, Math.max(0, value)) * (COLOURS.length - 1);
  const from = Math.min(COLOURS.length - 2, Math.floor(place));
  return COLOURS[from].map((part, channel) => {
    return Math.round(part + (place - from) * (COLOURS[from + 1][channel] - part));
  });
}

const FAINT = 40; // opacity of a cell without relevance, of 255
const STRONG = 200;

// A canvas with one pixel per cell; the less relevant a cell, the more of the image shows through. map: rows of
// relevance.
export function heatMap(map) {
  const [rows, columns] = [map.length, map[0].length];
  const canvas = el("canvas", { class: "heat", width: columns, height: rows, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(columns, rows);
  map.flat().forEach((value, cell) => {
    pixels.data.set([...heatColour(value), FAINT + (STRONG - FAINT) * value], 4 * cell);
  });
  context.putImageData(pixels, 0, 0);
  return canvas;
}

// One frame per region that got tokens of its own. labels: whether each frame shows its number of tokens.
export function regionBoxes(regions, labels) {
  const layer = el("div", { class: "regions" });
  regions.forEach((region, index) => {
    if (!region.tokens) return;
    const [left, top, right, bottom] = region.box;
    const kind = region.lod >= 1 ? "native" : "lower";
    const frame = el("div", { class: `region ${kind}`, "data-region": index });
    frame.style.left = `${100 * left}%`;
    frame.style.top = `${100 * top}%`;
    frame.style.width = `${100 * (right - left)}%`;
    frame.style.height = `${100 * (bottom - top)}%`;
    if (labels) frame.append(el("span", { class: "tag", text: String(region.tokens) }));
    layer.append(frame);
  });
  return layer;
}
