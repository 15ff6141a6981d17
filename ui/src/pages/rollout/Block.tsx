import { useQueryClient } from "@tanstack/react-query";
import { type ReactNode, memo, useMemo, useState } from "react";
import { bodyQuery, type RolloutKey } from "../../api/queries";
import type { BlockView } from "../../api/types";
import { Button } from "../../components/controls";
import { Code } from "../../components/Code";
import { Diff } from "../../components/Diff";
import { Text } from "../../components/Text";
import { difference } from "../../text/difference";
import { bytes, count } from "../../text/format";
import { languageOf } from "../../text/highlight";
import { terminalText } from "../../text/terminal";
import { argumentsOf, commandOf, editsOf, fieldsOf, firstLine } from "./conversation";
import styles from "./Block.module.css";

/** Longer texts are folded to their first lines until they are opened. */
const FOLDED_LINES = 14;
const FOLDED_CHARACTERS = 2_500;

/** A text of any size: its beginning, then more of it by button, each with how much there is. */
function LongText(props: {
  text: string;
  size: number;
  more: (offset: number) => Promise<{ text: string; next: number | null }>;
  render: (text: string) => ReactNode;
}) {
  const { size } = props;
  const [read, setRead] = useState("");
  const [failure, setFailure] = useState<string | null>(null);
  const [isOpen, setOpen] = useState(false);
  const text = props.text + read;
  const lines = text.split("\n");
  const isLong = lines.length > FOLDED_LINES + 4 || text.length > FOLDED_CHARACTERS;
  const shown = isOpen || !isLong ? text : lines.slice(0, FOLDED_LINES).join("\n").slice(0, FOLDED_CHARACTERS);
  const rest = size - text.length;
  const readMore = () =>
    props.more(text.length).then(
      (range) => setRead((before) => before + range.text),
      (error: Error) => setFailure(error.message),
    );
  return (
    <>
      {props.render(shown)}
      {(isLong || rest > 0) && (
        <div className={styles.more}>
          {isLong && (
            <Button onClick={() => setOpen(!isOpen)} aria-expanded={isOpen}>
              {isOpen ? "Fold" : `Show ${count(lines.length)} lines`}
            </Button>
          )}
          {(isOpen || !isLong) && rest > 0 && (
            <Button onClick={() => void readMore()}>
              Read more: {bytes(text.length)} of {bytes(size)}
            </Button>
          )}
          {!isOpen && isLong && rest > 0 && <span>{bytes(size)} in all</span>}
          {failure !== null && <span role="alert">{failure}</span>}
        </div>
      )}
    </>
  );
}

function useBody(key: RolloutKey, block: BlockView, field: "text" | "arguments") {
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

function ToolCall({ block, body }: { block: BlockView; body: RolloutKey }) {
  const more = useBody(body, block, "arguments");
  const input = useMemo(() => argumentsOf(block), [block]);
  const edits = useMemo(
    () =>
      (input === null ? [] : editsOf(input)).map((edit) =>
        edit.before === null ? edit : { ...edit, diff: difference(edit.path, edit.before, edit.after) },
      ),
    [input],
  );
  const command = input === null ? null : commandOf(input);
  if (command !== null) {
    const about = input?.["description"];
    return (
      <div className={styles.terminal}>
        {typeof about === "string" && (
          <p className={styles.about}>
            <Text>{about}</Text>
          </p>
        )}
        <LongText
          text={command}
          size={command.length}
          more={more}
          render={(text) => (
            <div className={styles.command}>
              <span aria-hidden="true">$ </span>
              <Code text={text} language="bash" />
            </div>
          )}
        />
      </div>
    );
  }
  if (edits.length > 0) {
    return edits.map((edit, index) =>
      "diff" in edit ? (
        <Diff key={index} file={edit.diff} />
      ) : (
        <div key={index} className={styles.file}>
          <p className={styles.path}>
            <Text>{edit.path}</Text>
          </p>
          <LongText
            text={edit.after}
            size={edit.after.length}
            more={more}
            render={(text) => <Code text={text} language={languageOf(edit.path)} />}
          />
        </div>
      ),
    );
  }
  const fields = input === null ? null : fieldsOf(input);
  if (fields !== null) {
    return (
      <dl className={styles.fields}>
        {fields.map(([name, value]) => (
          <div key={name}>
            <dt>
              <Text>{name}</Text>
            </dt>
            <dd>
              <Text>{value}</Text>
            </dd>
          </div>
        ))}
      </dl>
    );
  }
  const whole = input === null ? block.arguments : JSON.stringify(input, null, 2);
  return (
    <LongText
      text={whole}
      size={input === null ? block.arguments_size : whole.length}
      more={more}
      render={(text) => <Code text={text} language={input === null ? null : "json"} />}
    />
  );
}

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
  const more = useBody(body, block, "text");
  const isSystem = block.role === "system";
  const isTerminal = block.kind === "tool_result" && (tool === undefined || /bash|shell|exec|command/i.test(tool));
  const title = isSystem ? "System prompt" : block.kind === "text" && block.role === "user" ? "User" : TITLES[block.kind];
  const content =
    block.kind === "tool_use" ? (
      <ToolCall block={block} body={body} />
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
      {block.images > 0 && (
        <p className={styles.title}>
          {count(block.images)} image{block.images === 1 ? "" : "s"}
        </p>
      )}
    </div>
  );
});
