import { memo } from "react";
import { pieces } from "../text/escapes";
import styles from "./Text.module.css";

/** Shows text that a model, an agent or a log wrote: isolated, with invisible characters shown by code point. */
export const Text = memo(function Text({ children }: { children: string }) {
  const parts = pieces(children);
  if (parts.length === 1 && !parts[0]?.escaped) return <bdi>{parts[0]?.text}</bdi>;
  return (
    <bdi>
      {parts.map((piece, index) =>
        piece.escaped ? (
          <span key={index} className={styles.escape} title="a character that cannot be seen">
            {piece.text}
          </span>
        ) : (
          piece.text
        ),
      )}
    </bdi>
  );
});
