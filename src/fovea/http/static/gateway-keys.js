// The dialogs in which an operator makes, changes and revokes keys, and changes the limits of a tenant.

import { confirmed, el } from "./dom.js";
import { words } from "./gateway-tables.js";

const JSON_TYPE = { "content-type": "application/json" };

export class KeyDialogs {
  // client: sends requests. dialogs: {key, secret, limits}, the elements of gateway.html. onChange: called after a
  // change.
  constructor(client, dialogs, onChange) {
    Object.assign(this, { client, dialogs, onChange });
    this.limits = []; // the limits that there are, as /admin/keys describes them
    this.roles = [];
    for (const dialog of Object.values(dialogs)) {
      for (const button of dialog.querySelectorAll("[data-cancel]")) button.addEventListener("click", () => dialog.close());
    }
    dialogs.secret.addEventListener("close", () => { dialogs.secret.querySelector("output").textContent = ""; });
    dialogs.secret.querySelector("[data-copy]").addEventListener("click", () => this.copy());
  }

  // Use the answer of /admin/keys.
  describe({ limits, roles }) {
    Object.assign(this, { limits, roles });
  }

  create() {
    const form = this.open(this.dialogs.key, "New key", ["api"], null, {});
    form.elements.name.disabled = false;
    form.elements.name.value = "";
    form.elements.name.focus();
    this.onSubmit(this.dialogs.key, async () => {
      const limits = Object.fromEntries(Object.entries(this.written(form)).filter(([, value]) => value !== null));
      const made = await this.send("POST", "admin/keys", {
        name: form.elements.name.value.trim(), roles: this.chosen(form), expires: form.elements.expires.value || null, limits,
      });
      this.showSecret(made);
    });
  }

  // key: a row of /admin/keys.
  change(key) {
    const form = this.open(this.dialogs.key, `Key ${key.fingerprint}`, key.roles, key.expires, null);
    form.elements.name.value = key.name;
    form.elements.name.disabled = true;
    this.onSubmit(this.dialogs.key, async () => {
      const expires = form.elements.expires.value || null;
      const body = { roles: this.chosen(form) };
      if (expires !== (key.expires?.slice(0, 10) ?? null)) body.expires = expires;
      await this.send("PATCH", `admin/keys/${key.fingerprint}`, body);
    });
  }

  async revoke(fingerprint, name) {
    if (!(await confirmed(`Revoke the key ${fingerprint} of ${name}? Requests with it are refused from then on.`, "Revoke"))) return null;
    try {
      await this.send("DELETE", `admin/keys/${fingerprint}`);
      return null;
    } catch (error) {
      return error;
    }
  }

  // tenant: a row of /admin/tenants.
  limit(tenant) {
    const dialog = this.dialogs.limits;
    const form = dialog.querySelector("form");
    dialog.querySelector("h2").textContent = `Limits of ${tenant.name}`;
    this.fillLimits(form, tenant.limits);
    this.onSubmit(dialog, async () => {
      const before = tenant.limits;
      const limits = Object.fromEntries(Object.entries(this.written(form))
        .filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(before[name] ?? null)));
      if (Object.keys(limits).length) {
        await this.send("PATCH", `admin/tenants/${encodeURIComponent(tenant.name)}`, { limits });
      }
    });
    dialog.showModal();
  }

  // Fill the dialog of a key, and show it. limits: values by name; null: it has no fields for limits.
  open(dialog, title, roles, expires, limits) {
    const form = dialog.querySelector("form");
    dialog.querySelector("h2").textContent = title;
    form.querySelector("[data-roles]").replaceChildren(...this.roles.map((role) => el("label", { class: "check" },
      el("input", { type: "checkbox", name: "role", value: role, checked: roles.includes(role) }), role)));
    form.elements.expires.value = expires?.slice(0, 10) ?? "";
    form.querySelector("details").hidden = limits === null;
    form.querySelector("details").open = false;
    this.fillLimits(form, limits ?? {});
    dialog.showModal();
    return form;
  }

  fillLimits(form, values) {
    form.querySelector("[data-limits]").replaceChildren(...this.limits.map(({ name, default: usual, help, accepted }) => {
      const value = values[name];
      const id = `${form.id}-${name}`;
      const field = typeof usual === "boolean"
        ? el("select", { id, name: `limit-${name}` }, ...["", "true", "false"].map((text) => el("option",
          { value: text, text: text || `usual (${usual})`, selected: text === String(value ?? "") })))
        : el("input", { id, name: `limit-${name}`, autocomplete: "off", value: value === undefined ? "" : asText(value),
          placeholder: /0: no limit/.test(help) ? "no limit" : `usual (${asText(usual) || "all"})` });
      return el("div", { class: "field", title: `${help} Accepted: ${accepted}.` }, el("label", { for: id, text: words(name) }), field);
    }));
  }

  // The limits that a form states; null: the usual value.
  written(form) {
    return Object.fromEntries(this.limits.map(({ name, default: usual }) => {
      return [name, valueOf(form.elements[`limit-${name}`].value.trim(), usual)];
    }));
  }

  chosen(form) {
    return [...form.querySelectorAll("[name=role]:checked")].map(({ value }) => value);
  }

  // Send the form of a dialog once it is submitted. An error is shown in the dialog, which then stays. A second click
  // while the first one is sent does nothing: it would make a second key.
  onSubmit(dialog, send) {
    const form = dialog.querySelector("form");
    const problem = dialog.querySelector("[data-problem]");
    problem.textContent = "";
    let sending = false;
    form.onsubmit = async (event) => {
      event.preventDefault();
      if (sending) return;
      sending = true;
      problem.textContent = "";
      try {
        await send();
        dialog.close();
      } catch (error) {
        problem.textContent = error.message;
      } finally {
        sending = false;
      }
    };
  }

  async send(method, path, body) {
    const response = await this.client.request(path, body === undefined ? { method }
      : { method, headers: JSON_TYPE, body: JSON.stringify(body) });
    this.onChange();
    return response.json();
  }

  // Show a new key. This is the only time that anybody sees it.
  showSecret({ key, name }) {
    const { secret } = this.dialogs;
    secret.querySelector("[data-name]").textContent = name;
    secret.querySelector("output").textContent = key;
    secret.querySelector("[data-copied]").textContent = "";
    secret.showModal();
  }

  async copy() {
    const { secret } = this.dialogs;
    const note = secret.querySelector("[data-copied]");
    try {
      await navigator.clipboard.writeText(secret.querySelector("output").textContent);
      note.textContent = "Copied.";
    } catch {
      note.textContent = "The browser does not let this page copy. Select the key, and copy it.";
    }
  }
}

function asText(value) {
  return Array.isArray(value) ? value.join(", ") : String(value);
}

// The value of a field, of the type of the usual one. What is no number stays a text, and the gateway says what is
// accepted.
function valueOf(text, usual) {
  if (text === "") return null;
  if (typeof usual === "boolean") return text === "true";
  if (Array.isArray(usual)) return text.split(",").map((part) => part.trim()).filter(Boolean);
  if (typeof usual === "number" && !Number.isNaN(Number(text))) return Number(text);
  return text;
}
