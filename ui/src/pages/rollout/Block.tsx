import { useQueryClient } from "@tanstack/react-query";
import { memo } from "react";
import { bodyQuery, type RolloutKey } from "../../api/queries";
import type { BlockView } from "../../api/types";
import { Text } from "../../components/Text";
import { bytes } from "../../text/format";
import { terminalText } from "../../text/terminal";
import { firstLine } from "./conversation";
import { Image } from "./Image";
import { LongText, type ReadMore } from "./LongText";
import { ToolCall } from "./ToolCall";
import styles from "./Block.module.css";

function useBody(key: RolloutKey, block: BlockView, field: "text" | "arguments"): ReadMore {
  const client = useQueryClient();
  return (offset: number) => client.fetchQuery(bodyQuery(key, block.ref, field, offset));
}

const plain = (text: string) => (
  <pre className={styles.prose}>
    <Text>{text}</Text>
  </pre>
);

const output = (text: string) => (
  <pre className={styles.output}>
    <Text>{terminalText(text)}</Text>
  </pre>
);

const TITLES: Record<BlockView["kind"], string> = {
  other: "Other",
  text: "",
  thinking: "Thinking",
  tool_result: "Result",
  tool_use: "",
};

/** One block of a conversation: text, thinking, a tool call or its result. `tool` names the call of a result. */
export const Block = memo(function Block(props: { block: BlockView; body: RolloutKey; tool?: string | undefined }) {
  const { block, body, tool } = props;
  const more = useBody(body, block, block.kind === "tool_use" ? "arguments" : "text");
  const isSystem = block.role === "system";
  const isTerminal = block.kind === "tool_result" && (tool === undefined || /bash|shell|exec|command/i.test(tool));
  const title = isSystem ? "System prompt" : block.kind === "text" && block.role === "user" ? "User" : TITLES[block.kind];
  const content =
    block.kind === "tool_use" ? (
      <ToolCall block={block} more={more} />
    ) : (
      <LongText
        text={block.text}
        size={block.text_size}
        more={more}
        render={isTerminal || block.kind === "tool_result" ? output : plain}
      />
    );
  const isFolded = isSystem || (block.kind === "text" && block.text.startsWith("<system-reminder>"));
  return (
    <div className={`${styles.block} ${styles[isSystem ? "system" : block.kind]} ${block.is_error ? styles.failed : ""}`}>
      {block.kind === "tool_use" ? (
        <p className={styles.title}>
          <span className={styles.tool}>
            <Text>{block.name}</Text>
          </span>
          {block.malformed && <span className={styles.bad}>arguments are no JSON object</span>}
        </p>
      ) : (
        title !== "" &&
        !isFolded && (
          <p className={styles.title}>
            {title}
            {tool !== undefined && (
              <>
                {" of "}
                <Text>{tool}</Text>
              </>
            )}
            {block.is_error && <span className={styles.bad}>error</span>}
          </p>
        )
      )}
      {isFolded ? (
        <details>
          <summary className={styles.title}>
            {isSystem ? title : firstLine(block.text, 40)} <span>{bytes(block.text_size)}</span>
          </summary>
          {content}
        </details>
      ) : (
        content
      )}
      {block.images.map((image, index) => (
        <Image key={index} body={body} block={block.ref} index={index} image={image} />
      ))}
    </div>
  );
});
