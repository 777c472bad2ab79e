// The list of conversations.

import { el, iconButton } from "./dom.js";

// list: the <ul>. actions: {open(id), remove(id, title)}. current: id of the conversation that is shown.
export function showConversations(list, records, current, actions) {
  list.replaceChildren(...records.map(({ id, title, updated }) => el("li", {},
    el("a", {
      href: `#${id}`, "aria-current": id === current ? "page" : null, title: new Date(updated).toLocaleString(),
      text: title || "Untitled",
    }),
    iconButton("trash", `Delete ${title || "Untitled"}`, () => actions.remove(id, title), "quiet danger"))));
}
