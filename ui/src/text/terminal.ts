// CSI sequences (colours, cursor), OSC sequences (titles, links) up to BEL or ST, and two-character escapes.
const ANSI =
  // eslint-disable-next-line no-control-regex
  /\u001b\[[0-?]*[ -/]*[@-~]|\u009b[0-?]*[ -/]*[@-~]|\u001b[\]PX^_][^\u0007\u001b]*(?:\u0007|\u001b\\)|\u001b[ -/]*[0-~]/g;

/**
 * Returns the text of a terminal's output: escape sequences removed, and of a line that carriage returns overwrote
 * (a progress bar) what was last written.
 */
export function terminalText(output: string): string {
  return output
    .replace(ANSI, "")
    .replaceAll("\r\n", "\n")
    .split("\n")
    .map((line) => {
      const trimmed = line.endsWith("\r") ? line.slice(0, -1) : line;
      return trimmed.slice(trimmed.lastIndexOf("\r") + 1);
    })
    .join("\n");
}
