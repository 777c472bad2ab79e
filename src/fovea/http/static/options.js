// The options of requests: visual tokens, form of the answer, sampling. They are kept in localStorage.

import { describeBudget, percent } from "./budget.js";
import { el } from "./dom.js";

const NAME = "fovea-options";
const FIRST_SHARE = 0.5; // when a method is chosen
const DEFAULTS = {
  method: "server", keep: 1, json: false, maxTokens: 512, temperature: "", system: "",
  schema: JSON.stringify({
    type: "object",
    properties: { answer: { type: "string" } },
    required: ["answer"],
    additionalProperties: false,
  }, null, 2),
};

export class Options {
  // panel: the element with the form of index.html. figures: the content of budget.json.
  constructor(panel, figures) {
    this.form = panel.querySelector("form");
    this.figures = figures;
    this.effect = panel.querySelector("#budget-effect");
    this.problem = panel.querySelector("#schema-problem");
    this.values = { ...DEFAULTS, ...stored() };
    this.fill();
    this.form.addEventListener("input", () => this.read());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.onChange = () => {};
  }

  fill() {
    const { elements } = this.form;
    for (const [name, value] of Object.entries(this.values)) {
      if (elements[name].type === "checkbox") elements[name].checked = value;
      else elements[name].value = name === "keep" ? Math.round(100 * value) : value;
    }
    this.show();
  }

  read() {
    const { elements } = this.form;
    const { method } = this.values;
    for (const name of Object.keys(DEFAULTS)) {
      const field = elements[name];
      this.values[name] = field.type === "checkbox" ? field.checked : field.value;
    }
    // A method does nothing if all tokens are kept, and then there is no map either.
    if (method === "server" && this.values.method !== "server" && elements.keep.value === elements.keep.max) {
      elements.keep.value = String(100 * FIRST_SHARE);
    }
    this.values.keep = Number(elements.keep.value) / 100;
    localStorage.setItem(NAME, JSON.stringify(this.values));
    this.show();
    this.onChange();
  }

  show() {
    const { method, keep, json } = this.values;
    const { elements } = this.form;
    const own = method !== "server";
    elements.keep.disabled = !own;
    elements.keep.setAttribute("aria-valuetext", `${percent(keep)} of the visual tokens`);
    this.form.querySelector("#keep-value").textContent = own ? percent(keep) : "server";
    this.showEffect(own, method, keep);
    this.form.querySelector("#schema-field").hidden = !json;
    this.problem.textContent = json ? this.schemaProblem() : "";
  }

  showEffect(own, method, keep) {
    const { note, measured } = own ? describeBudget(this.figures, method, keep)
      : { note: "The server decides how many visual tokens an image keeps.", measured: [] };
    this.effect.replaceChildren(
      ...(note ? [el("p", { text: note })] : []),
      ...measured.map(({ share, label, time, accuracy }) => el("dl", {},
        el("dt", { text: "At" }), el("dd", {}, el("strong", { text: `${percent(share)} of the tokens` })),
        el("dt", { text: label }), el("dd", { text: time }),
        el("dt", { text: "Accuracy" }), el("dd", { text: accuracy }))),
      ...(measured.length ? [el("p", { class: "muted", text: `Measured with ${this.figures.model} on generated ` +
        "scenes. Your images differ." })] : []));
  }

  schemaProblem() {
    try {
      const schema = JSON.parse(this.values.schema);
      return schema && typeof schema === "object" ? "" : "A schema is a JSON object.";
    } catch (error) {
      return `The schema is not JSON: ${error.message}`;
    }
  }

  // Words about what differs from the defaults, for the line below the question.
  get summary() {
    const { method, keep, json } = this.values;
    return [
      ...(method === "server" ? [] : [`${percent(keep)} of visual tokens${keep < 1 ? `, ${method}` : ""}`]),
      ...(json ? ["JSON answer"] : []),
    ];
  }

  // The fields of a request. hasImages: whether its messages have any. Raises Error for a schema that is not JSON.
  fields(hasImages) {
    const { method, keep, json, maxTokens, temperature, schema } = this.values;
    const fields = {};
    if (Number(maxTokens) > 0) fields.max_tokens = Number(maxTokens);
    if (temperature !== "") fields.temperature = Number(temperature);
    if (hasImages && method !== "server") fields.visual_tokens = visualTokens(method, keep);
    if (json) {
      const problem = this.schemaProblem();
      if (problem) throw new Error(problem);
      fields.response_format = {
        type: "json_schema", json_schema: { name: "answer", strict: true, schema: JSON.parse(schema) },
      };
    }
    return fields;
  }

  // Return to the defaults, and forget the stored values.
  reset() {
    localStorage.removeItem(NAME);
    this.values = { ...DEFAULTS };
    this.fill();
    this.onChange();
  }
}

function visualTokens(method, keep) {
  if (keep >= 1) return { keep: 1 };
  return { method, keep, ...(method === "relevance" ? { explain: true } : {}) };
}

function stored() {
  try {
    const values = JSON.parse(localStorage.getItem(NAME)) || {};
    return Object.fromEntries(Object.entries(values).filter(([name, value]) => typeof value === typeof DEFAULTS[name]));
  } catch {
    return {};
  }
}
