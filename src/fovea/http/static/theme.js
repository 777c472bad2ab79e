// The colour theme of all pages: the system's, light or dark. The choice is kept in localStorage.

const NAME = "fovea-theme";
const THEMES = ["system", "light", "dark"];
const LABELS = { system: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };

export function theme() {
  const stored = localStorage.getItem(NAME);
  return THEMES.includes(stored) ? stored : "system";
}

export function applyTheme(name = theme()) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
}

// Make a button that switches to the next theme at each click.
export function themeButton(button) {
  const show = () => {
    button.textContent = { system: "◐", light: "☀", dark: "☾" }[theme()];
    button.setAttribute("aria-label", LABELS[theme()]);
    button.title = LABELS[theme()];
  };
  button.addEventListener("click", () => {
    localStorage.setItem(NAME, THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
    applyTheme();
    show();
  });
  show();
}

applyTheme();
