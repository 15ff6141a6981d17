import { useEffect, useRef } from "react";

/** What keys do: `event.key` to an action. An action that returns false leaves the key to the browser. */
export type Keys = Record<string, (event: KeyboardEvent) => boolean | void>;

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}

/** Listens for keys while the component is mounted; not while something is typed, and not with Ctrl, Alt or Meta. */
export function useKeys(keys: Keys): void {
  const current = useRef(keys);
  useEffect(() => {
    current.current = keys;
  });
  useEffect(() => {
    const listen = (event: KeyboardEvent) => {
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
      if (isTyping(event.target)) {
        if (event.key === "Escape") (event.target as HTMLElement).blur();
        return;
      }
      if (document.querySelector("dialog[open]") !== null) return;
      const action = current.current[event.key];
      if (action !== undefined && action(event) !== false) event.preventDefault();
    };
    window.addEventListener("keydown", listen);
    return () => window.removeEventListener("keydown", listen);
  }, []);
}
