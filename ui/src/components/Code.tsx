import { memo, useMemo } from "react";
import { highlight, type Span } from "../text/highlight";
import { Text } from "./Text";
import styles from "./Code.module.css";

/** Pieces of highlighted text. */
export const Spans = memo(function Spans({ spans }: { spans: Span[] }) {
  return spans.map((span, index) =>
    span.kind === null ? (
      <Text key={index}>{span.text}</Text>
    ) : (
      <span key={index} className={styles[span.kind.replaceAll(/[^a-z]/g, "_")] ?? styles["other"]}>
        <Text>{span.text}</Text>
      </span>
    ),
  );
});

/** A text in a fixed-width font, in the colours of its language if that is highlighted. */
export const Code = memo(function Code({ text, language }: { text: string; language: string | null }) {
  const spans = useMemo(() => highlight(text, language), [text, language]);
  return (
    <pre className={styles.code}>
      <Spans spans={spans} />
    </pre>
  );
});
