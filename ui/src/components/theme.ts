import { useSyncExternalStore } from "react";

export type Theme = "light" | "dark";

const STORAGE = "understudy-theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();

function chosen(): Theme | null {
  try {
    const value = window.localStorage.getItem(STORAGE);
    return value === "light" || value === "dark" ? value : null;
  } catch {
    return null; // Storage is forbidden in this browser, or for a file: the system's theme is used.
  }
}

let theme: Theme = chosen() ?? (system.matches ? "dark" : "light");

function apply(next: Theme): void {
  theme = next;
  document.documentElement.dataset["theme"] = next;
  for (const listener of listeners) listener();
}

apply(theme);
system.addEventListener("change", () => {
  if (chosen() === null) apply(system.matches ? "dark" : "light");
});

/** Changes between light and dark, and remembers it in this browser. */
export function toggleTheme(): void {
  const next = theme === "dark" ? "light" : "dark";
  try {
    window.localStorage.setItem(STORAGE, next);
  } catch {
    // Storage is forbidden: the choice holds until the page is closed.
  }
  apply(next);
}

export function useTheme(): Theme {
  return useSyncExternalStore(
    (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    () => theme,
  );
}
