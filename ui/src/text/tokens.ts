import type { TokenPage } from "../api/types";

/** The logprob at and below which a token is coloured most strongly: e^-5 is a probability of 0.7 %. */
const FLOOR = -5;

/** A sampled token less probable than this (5 %) is a stop of the key that jumps to improbable tokens. */
export const IMPROBABLE = Math.log(0.05);

/** Returns how improbable a token was, from 0 (certain) to 4 (at most 0.7 %), in equal steps of logprob. */
export function surprise(logprob: number | null | undefined): 0 | 1 | 2 | 3 | 4 | null {
  if (logprob == null || Number.isNaN(logprob)) return null;
  const step = Math.floor((Math.max(FLOOR, Math.min(0, logprob)) / FLOOR) * 5) + 0;
  return Math.min(4, step) as 0 | 1 | 2 | 3 | 4;
}

/** The columns of a page of tokens that tell which of them a call has sampled. */
type SampledColumns = Pick<TokenPage, "start" | "call_start" | "call_end" | "mask" | "logprobs">;

/** Returns a page's logprobs, null for tokens that the page's call, or with "segment" any call, did not sample. */
export function sampledLogprobs(page: SampledColumns, scope: "call" | "segment"): (number | null)[] {
  const [first, end] = scope === "call" ? [page.call_start - page.start, page.call_end - page.start] : [0, Infinity];
  return page.logprobs.map((logprob, index) =>
    page.mask[index] === 1 && first <= index && index < end ? (logprob ?? null) : null,
  );
}

/** Returns the index of the next token below `IMPROBABLE` after (or, backwards, before) `from`; null if there is none. */
export function nextImprobable(
  logprobs: readonly (number | null | undefined)[],
  from: number,
  direction: 1 | -1,
): number | null {
  for (let index = from + direction; index >= 0 && index < logprobs.length; index += direction) {
    const logprob = logprobs[index];
    if (logprob != null && logprob < IMPROBABLE) return index;
  }
  return null;
}

/** Returns the index of the least probable token; null where no logprob is known. */
export function leastProbable(logprobs: readonly (number | null | undefined)[]): number | null {
  let least: number | null = null;
  logprobs.forEach((logprob, index) => {
    if (logprob != null && logprob < (least === null ? Infinity : (logprobs[least] ?? Infinity))) least = index;
  });
  return least;
}

/** Returns a token's text with whitespace made visible where the whole token is whitespace. */
export function tokenLabel(text: string): string {
  if (text === "") return "∅";
  if (/^\s+$/u.test(text)) return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");
  return text;
}

/** Returns a class for a value around 0: how far it is above (`above1`, `above2`) or below it; null for no value. */
export function shade(value: number | null | undefined): "zero" | "above1" | "above2" | "below1" | "below2" | null {
  if (value == null || Number.isNaN(value)) return null;
  if (Math.abs(value) < 0.01) return "zero";
  const step = Math.abs(value) < 0.5 ? 1 : 2;
  return value > 0 ? `above${step}` : `below${step}`;
}
