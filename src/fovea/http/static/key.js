// API keys. They live in sessionStorage only: they end with the tab, and no other tab reads them.

export class Keys {
  // name: entry of sessionStorage, such as "fovea-key".
  constructor(name) {
    this.name = name;
  }

  get value() {
    return sessionStorage.getItem(this.name) || "";
  }

  set value(key) {
    if (key) sessionStorage.setItem(this.name, key);
    else sessionStorage.removeItem(this.name);
  }

  // The headers that a request needs.
  headers() {
    return this.value ? { authorization: `Bearer ${this.value}` } : {};
  }
}

// Ask for a key in a <dialog> that holds a form with an input named "key" and an element [data-reason].
// Resolves with true once a key was entered, and with false if the user closes the dialog.
export function askForKey(dialog, keys, reason) {
  const form = dialog.querySelector("form");
  dialog.querySelector("[data-reason]").textContent = reason;
  form.elements.key.value = "";
  if (!dialog.open) dialog.showModal();
  form.elements.key.focus();
  return new Promise((resolve) => {
    const end = new AbortController();
    const finish = (given) => {
      end.abort();
      if (dialog.open) dialog.close();
      resolve(given);
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const key = form.elements.key.value.trim();
      if (!key) return;
      keys.value = key;
      form.elements.key.value = "";
      finish(true);
    }, { signal: end.signal });
    for (const button of dialog.querySelectorAll("[data-cancel]")) {
      button.addEventListener("click", () => finish(false), { signal: end.signal });
    }
    dialog.addEventListener("close", () => finish(false), { signal: end.signal });
  });
}
