import { useNavigate } from "@tanstack/react-router";
import type { UrlState } from "../text/address";
import { useKeys } from "./keyboard";

/** The key "u" goes to the page above this one, whose state is `search`. */
export function useUpKey(to: string, params: Record<string, string>, search: UrlState = {}): void {
  const navigate = useNavigate();
  useKeys({ u: () => void navigate({ to, params, search } as never) });
}
