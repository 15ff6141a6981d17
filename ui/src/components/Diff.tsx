import { memo, useMemo } from "react";
import type { FileDiff } from "../text/difference";
import { highlightLines, languageOf, type Span } from "../text/highlight";
import { Spans } from "./Code";
import { Text } from "./Text";
import styles from "./Diff.module.css";

/** More changed lines than this are shown on demand: each is an element of the page. */
const SHOWN_LINES = 400;

const MARK = { same: " ", added: "+", removed: "−" } as const;
const CHANGE = { same: "", added: "added", removed: "removed" } as const;

function linesOf(file: FileDiff): Map<object, Span[]> {
  const language = languageOf(file.after ?? file.before ?? "");
  const spans = new Map<object, Span[]>();
  for (const hunk of file.hunks) {
    // Both sides of a hunk are highlighted as a whole, so that strings over several lines have their colour.
    for (const side of ["removed", "added"] as const) {
      const lines = hunk.lines.filter((line) => line.kind === "same" || line.kind === side);
      const highlighted = highlightLines(lines.map((line) => line.text).join("\n"), language);
      lines.forEach((line, index) => spans.set(line, highlighted[index] ?? []));
    }
  }
  return spans;
}

/** The changes of one file, with line numbers of both sides. */
export const Diff = memo(function Diff({ file, heading = true }: { file: FileDiff; heading?: boolean }) {
  const spans = useMemo(() => linesOf(file), [file]);
  const total = file.hunks.reduce((sum, hunk) => sum + hunk.lines.length, 0);
  const body = (
    <table className={styles.lines}>
      <tbody>
        {file.hunks.map((hunk, index) => [
          <tr key={index} className={styles.hunk}>
            <td colSpan={4}>{hunk.header}</td>
          </tr>,
          ...hunk.lines.map((line, number) => (
            <tr key={`${index}.${number}`} className={styles[line.kind]}>
              <td className={styles.number}>{line.before}</td>
              <td className={styles.number}>{line.after}</td>
              <td className={styles.mark}>
                {MARK[line.kind]}
                <span className="visually-hidden">{CHANGE[line.kind]}</span>
              </td>
              <td className={styles.text}>
                <Spans spans={spans.get(line) ?? []} />
              </td>
            </tr>
          )),
        ])}
      </tbody>
    </table>
  );
  return (
    <section className={styles.file} aria-label={`Changes of ${file.after ?? file.before ?? "a file"}`}>
      {heading && (
        <header className={styles.heading}>
          <Text>{file.after ?? file.before ?? ""}</Text>
          {file.before === null && <span className={styles.note}>new</span>}
          {file.after === null && <span className={styles.note}>deleted</span>}
          <span className={styles.plus}>+{file.added}</span>
          <span className={styles.minus}>−{file.removed}</span>
        </header>
      )}
      {total > SHOWN_LINES ? (
        <details>
          <summary className={styles.more}>{total} lines</summary>
          {body}
        </details>
      ) : (
        body
      )}
    </section>
  );
});
