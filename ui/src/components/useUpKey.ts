import { useNavigate } from "@tanstack/react-router";
import { useKeys } from "./keyboard";

/** The key "u" goes to the page above this one. */
export function useUpKey(to: string, params: Record<string, string>): void {
  const navigate = useNavigate();
  useKeys({ u: () => void navigate({ to, params } as never) });
}
