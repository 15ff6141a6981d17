import type { BlockView } from "../../api/types";
import { Text } from "../../components/Text";
import { bytes } from "../../text/format";
import { ToolCall } from "./ToolCall";
import styles from "./PlainBlock.module.css";

/** A block without the rest of its text, for lists in which a look is enough; what is cut shows its size. */
export function PlainBlock({ block }: { block: BlockView }) {
  const isCall = block.kind === "tool_use";
  const cut = isCall ? 0 : block.text_size - block.text.length;
  return (
    <div className={`${styles.block} ${styles[block.kind] ?? ""}`}>
      <p className={styles.title}>
        <Text>{isCall ? block.name : block.kind === "text" ? block.role : block.kind.replace("_", " ")}</Text>
        {block.is_error && <span className={styles.bad}> error</span>}
      </p>
      {isCall ? (
        <ToolCall block={block} />
      ) : (
        <pre className={styles.text}>
          <Text>{block.text}</Text>
        </pre>
      )}
      {cut > 0 && <p className={styles.title}>… {bytes(cut)} more</p>}
    </div>
  );
}
