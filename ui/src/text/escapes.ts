/** A run of text that is shown as it is, or one character that is shown by its code point. */
export type Piece = { text: string; escaped: boolean };

// Direction marks and overrides, zero-width characters, line separators, and control characters other than tab and
// newline: what can make a text look like another one, or break the layout around it.
const INVISIBLE =
  // eslint-disable-next-line no-control-regex
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;

function codePoint(character: string): string {
  const code = character.codePointAt(0) ?? 0;
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Returns `text` in pieces; those that are `escaped` name a character that cannot be seen or changes direction. */
export function pieces(text: string): Piece[] {
  const normalized = text.replaceAll("\r\n", "\n");
  const result: Piece[] = [];
  let end = 0;
  for (const match of normalized.matchAll(INVISIBLE)) {
    if (match.index > end) result.push({ text: normalized.slice(end, match.index), escaped: false });
    result.push({ text: codePoint(match[0]), escaped: true });
    end = match.index + match[0].length;
  }
  if (end < normalized.length) result.push({ text: normalized.slice(end), escaped: false });
  return result;
}

/** Returns `text` with invisible characters written as code points, for attributes and titles. */
export function visible(text: string): string {
  return pieces(text)
    .map((piece) => (piece.escaped ? `[${piece.text}]` : piece.text))
    .join("");
}
