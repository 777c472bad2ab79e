// Small charts of the last five minutes, in SVG.

import { GAP_S, SPAN_S } from "./admin-history.js";
import { clock } from "./admin-format.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 88;
const FLOOR = HEIGHT - 2;
const ROOM = HEIGHT - 8;

/** Round up to 1, 2 or 5 times a power of ten, so that the scale of a chart changes rarely. */
export function niceMaximum(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999999);
}

/**
 * Split points into runs without gaps.
 * A missing value is not a gap if the next one follows within GAP_S: rates exist only in seconds with requests.
 */
export function runs(points, name) {
  const found = [];
  let last = null;
  for (const point of points) {
    const value = point.values[name];
    if (value == null) continue;
    if (last === null || point.time - last > GAP_S) found.push([]);
    found[found.length - 1].push([point.time, value]);
    last = point.time;
  }
  return found;
}

/**
 * One chart in a <figure data-chart>.
 * series: [{name, label, tone}]; tone: number of the colour, from 1.
 * show: writes a value as text. top: the upper end of the scale; null: it follows the values.
 */
export class Chart {
  constructor(figure, series, show, top = null) {
    this.series = series;
    this.show = show;
    this.top = top;
    this.points = [];
    this.cursor = null;
    this.title = figure.querySelector("figcaption").textContent;
    this.svg = figure.querySelector("svg");
    this.scale = figure.querySelector("[data-scale]");
    this.moment = figure.querySelector("[data-moment]");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    for (const share of [0, 0.5, 1]) {
      const y = FLOOR - share * ROOM;
      this.svg.append(shape("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y }));
    }
    this.lines = series.map(({ tone }, index) => {
      const area = index === 0 ? shape("path", { class: `area tone-${tone}` }) : null;
      const line = shape("path", { class: `line tone-${tone}` });
      if (area) this.svg.append(area);
      this.svg.append(line);
      return { area, line };
    });
    this.rule = shape("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.svg.append(this.rule);
    this.legend = series.map(({ label, tone }) => entry(figure.querySelector("[data-legend]"), label, tone));
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  /** Draw these points. The right edge is the time of the last one. */
  draw(points) {
    this.points = points;
    const end = points.length ? points[points.length - 1].time : 0;
    const all = this.series.map(({ name }) => runs(points, name));
    const highest = Math.max(0, ...all.flat(2).map(([, value]) => value));
    const top = this.top ?? niceMaximum(highest);
    const place = ([time, value]) => [
      (WIDTH * (time - end + SPAN_S)) / SPAN_S,
      FLOOR - (ROOM * Math.min(value, top)) / top,
    ];
    this.lines.forEach(({ area, line }, index) => {
      const placed = all[index].map((run) => run.map(place));
      line.setAttribute("d", placed.map(path).join(""));
      if (area) area.setAttribute("d", placed.map(filled).join(""));
    });
    this.scale.textContent = this.show(top);
    this.label();
  }

  /** Show the values at the pointer; null: the latest ones. */
  point(event) {
    const box = this.svg.getBoundingClientRect();
    this.cursor = event && box.width ? (event.clientX - box.left) / box.width : null;
    this.label();
  }

  /** Write the legend and the text for screen readers. */
  label() {
    const at = this.chosen();
    this.rule.setAttribute("visibility", this.cursor === null ? "hidden" : "visible");
    if (this.cursor !== null) {
      this.rule.setAttribute("x1", WIDTH * this.cursor);
      this.rule.setAttribute("x2", WIDTH * this.cursor);
    }
    this.moment.textContent = this.cursor === null || !at ? "last 5 minutes" : `at ${clock(at.time)}`;
    const texts = this.series.map(({ name, label }, index) => {
      const text = this.show(at ? this.latest(at, name) : null);
      if (this.legend[index].textContent !== text) this.legend[index].textContent = text;
      return `${label} ${text}`;
    });
    this.svg.setAttribute("aria-label", `${this.title}, last 5 minutes. Now: ${texts.join(", ")}.`);
  }

  chosen() {
    const last = this.points[this.points.length - 1];
    if (!last || this.cursor === null) return last;
    const time = last.time - SPAN_S * (1 - this.cursor);
    return this.points.reduce((best, point) =>
      Math.abs(point.time - time) < Math.abs(best.time - time) ? point : best, last);
  }

  /** The value of a point, or the one before it that is not older than GAP_S. */
  latest(at, name) {
    for (let index = this.points.indexOf(at); index >= 0; index -= 1) {
      const point = this.points[index];
      if (at.time - point.time > GAP_S) return null;
      if (point.values[name] != null) return point.values[name];
    }
    return null;
  }
}

function path(run) {
  if (run.length === 1) {
    const [[x, y]] = run;
    return `M${(x - 1).toFixed(1)} ${y.toFixed(1)}H${(x + 1).toFixed(1)}`;
  }
  return run.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

function filled(run) {
  const [first, last] = [run[0], run[run.length - 1]];
  return `${path(run)}L${last[0].toFixed(1)} ${FLOOR}L${first[0].toFixed(1)} ${FLOOR}Z`;
}

function entry(list, label, tone) {
  const item = document.createElement("li");
  const swatch = document.createElement("span");
  swatch.className = `swatch tone-${tone}`;
  const value = document.createElement("b");
  item.append(swatch, `${label} `, value);
  list.append(item);
  return value;
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
