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

const COLD = 110; // opacity of a cell without relevance, of 255; the image stays readable below every colour
const HOT = 80;

// A canvas with one pixel per cell; the more relevant a cell, the more of the image shows through. map: rows of
// relevance.
export function heatMap(map) {
  const [rows, columns] = [map.length, map[0].length];
  const canvas = el("canvas", { class: "heat", width: columns, height: rows, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(columns, rows);
  map.flat().forEach((value, cell) => {
    pixels.data.set([...heatColour(value), COLD + (HOT - COLD) * value], 4 * cell);
  });
  context.putImageData(pixels, 0, 0);
  return canvas;
}

// The regions that got tokens of their own, most tokens first, each with its number and its index in the list.
export function numbered(regions) {
  return regions.map((region, index) => ({ ...region, index })).filter((region) => region.tokens)
    .sort((a, b) => b.tokens - a.tokens || b.relevance - a.relevance)
    .map((region, place) => ({ ...region, number: place + 1 }));
}

// The facts about a numbered region. Answers that were stored before regions had a reason have no `why`.
export function regionWords({ number, why, tokens, of, lod, relevance }) {
  return `Region ${number}${why ? `, ${why}` : ""}: ${tokens} of ${of} tokens, ` +
    `${Math.round(100 * lod)} % of native resolution, relevance ${relevance.toFixed(2)}`;
}

// One frame per region that got tokens of its own. point: called with an index and whether that region is pointed
// at or focused; null: the frames are not for pointing at, and have no numbers.
export function regionBoxes({ regions, map }, point) {
  const layer = el("div", { class: "regions" });
  for (const region of numbered(regions)) {
    const [left, top, right, bottom] = region.box;
    const kind = region.lod >= 1 ? "native" : "lower";
    const named = point && { tabindex: "0", role: "img", "aria-label": regionWords(region) };
    const frame = el("div", { class: `region ${kind}`, "data-region": region.index, ...named,
      ...(point && pointing(region.index, point)) });
    frame.style.left = `${100 * left}%`;
    frame.style.top = `${100 * top}%`;
    frame.style.width = `${100 * (right - left)}%`;
    frame.style.height = `${100 * (bottom - top)}%`;
    if (point) frame.append(el("span", { class: `tag ${calmCorner(region.box, map)}`, text: String(region.number) }));
    layer.append(frame);
  }
  return layer;
}

// Listeners of an element that stands for a region.
export function pointing(index, point) {
  const [start, end] = [() => point(index, true), () => point(index, false)];
  return { onmouseenter: start, onmouseleave: end, onfocus: start, onblur: end };
}

// Classes of the corner of a box whose cell is the least relevant, so that a number there hides little.
function calmCorner([left, top, right, bottom], map) {
  const [rows, columns] = [map.length, map[0].length];
  const cell = (share, count, end) => Math.max(0, Math.min(count - 1, Math.round(share * count) - end));
  const [rowTop, rowBottom] = [cell(top, rows, 0), cell(bottom, rows, 1)];
  const [columnLeft, columnRight] = [cell(left, columns, 0), cell(right, columns, 1)];
  const corners = [["", map[rowTop][columnLeft]], ["right", map[rowTop][columnRight]],
    ["bottom", map[rowBottom][columnLeft]], ["right bottom", map[rowBottom][columnRight]]];
  return corners.reduce((best, corner) => (corner[1] < best[1] ? corner : best))[0];
}
