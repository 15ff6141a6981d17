import { useMemo } from "react";
import type { BlockView } from "../../api/types";
import { Code } from "../../components/Code";
import { Diff } from "../../components/Diff";
import { Text } from "../../components/Text";
import { difference } from "../../text/difference";
import { languageOf } from "../../text/highlight";
import { argumentsOf, commandOf, editsOf, fieldsOf } from "./conversation";
import { LongText, type ReadMore } from "./LongText";
import styles from "./Block.module.css";

/** What a tool is asked to do: a command, changes of files, or its arguments; `more` reads the rest of long ones. */
export function ToolCall({ block, more }: { block: BlockView; more?: ReadMore }) {
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
