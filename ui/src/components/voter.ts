import { useState } from "react";

const STORAGE = "understudy-voter";

/** Under whose name this browser's votes are stored, and a function that changes it. */
export function useVoter(): [string, (name: string) => void] {
  const [name, setName] = useState(() => {
    try {
      return window.localStorage.getItem(STORAGE) ?? "me";
    } catch {
      return "me"; // Storage is forbidden: the name is asked for anew in each page.
    }
  });
  const change = (next: string) => {
    setName(next);
    try {
      window.localStorage.setItem(STORAGE, next);
    } catch {
      // Storage is forbidden: the name holds until the page is closed.
    }
  };
  return [name, change];
}
