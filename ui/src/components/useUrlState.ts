import { useNavigate, useSearch } from "@tanstack/react-router";
import { useCallback } from "react";
import type { UrlState } from "../text/address";

/** The page's state in its address, and a function that changes parts of it without adding to the history. */
export function useUrlState(): [UrlState, (changes: UrlState) => void] {
  const state = useSearch({ strict: false }) as UrlState;
  const navigate = useNavigate();
  const change = useCallback(
    (changes: UrlState) => {
      void navigate({
        to: ".",
        search: (previous: UrlState) => ({ ...previous, ...changes }),
        replace: true,
        resetScroll: false,
      } as never);
    },
    [navigate],
  );
  return [state, change];
}
