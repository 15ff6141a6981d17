import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { useMemo } from "react";
import { logQuery, patchQuery, type RolloutKey } from "../../api/queries";
import type { RolloutHead, VerdictView } from "../../api/types";
import { Button, Toolbar } from "../../components/controls";
import { Diff } from "../../components/Diff";
import { Badge, Empty } from "../../components/marks";
import { useMore } from "../../components/More";
import { Card } from "../../components/Page";
import { Loaded } from "../../components/Query";
import { Text } from "../../components/Text";
import { useUrlState } from "../../components/useUrlState";
import { parseUnified } from "../../text/difference";
import { bytes, count, duration } from "../../text/format";
import { terminalText } from "../../text/terminal";
import styles from "./PatchPage.module.css";

const GOOD = ["passed", "xfailed", "xpassed"];

/** A unified diff, file by file; as plain text where it cannot be read as one. */
export function Patch({ text }: { text: string }) {
  const files = useMemo(() => parseUnified(text), [text]);
  if (files === null || files.length === 0) {
    return (
      <pre className={styles.plain}>
        <Text>{text}</Text>
      </pre>
    );
  }
  return (
    <div className={styles.files}>
      {files.map((file, index) => (
        <Diff key={index} file={file} />
      ))}
    </div>
  );
}

function OwnPatch({ body }: { body: RolloutKey }) {
  const [url, setUrl] = useUrlState();
  const offset = Number(url["from"] ?? 0) || 0;
  const result = useQuery(patchQuery(body, offset));
  return (
    <Loaded result={result}>
      {({ patch }) =>
        patch === null || patch.size === 0 ? (
          <Empty>The attempt left no patch.</Empty>
        ) : (
          <>
            {(patch.next !== null || offset > 0) && (
              <p className={styles.note}>
                {bytes(patch.offset)} to {bytes(patch.offset + patch.text.length)} of {bytes(patch.size)}{" "}
                {patch.next !== null && <Button onClick={() => setUrl({ from: String(patch.next) })}>Go on</Button>}
              </p>
            )}
            <Patch text={patch.text} />
          </>
        )
      }
    </Loaded>
  );
}

/** The attempt that was graded in place of this one, which made the same patch. */
function Reused({ store, source }: { store: string; source: NonNullable<VerdictView["reused_from"]> }) {
  return (
    <p className={styles.note}>
      Not graded itself: the verdict is that of{" "}
      {source.rollout_id === null ? (
        <Text>{`attempt ${source.attempt_id}`}</Text>
      ) : (
        <Link to="/s/$store/r/$rollout" params={{ store, rollout: source.rollout_id }} search={{ view: "patch", attempt: source.attempt_id } as never}>
          <Text>{`sample ${source.sample_index}, attempt ${source.attempt_id}`}</Text>
        </Link>
      )}
      , which made the same patch.
    </p>
  );
}

function Tests({ store, verdict }: { store: string; verdict: VerdictView }) {
  const [url, setUrl] = useUrlState();
  const onlyFailed = url["tests"] === "failed";
  const failed = verdict.tests.filter((test) => !GOOD.includes(test.outcome));
  const [shown, more] = useMore(onlyFailed ? failed : verdict.tests);
  const isRegraded = verdict.tests.some((test) => test.regraded !== null);
  const canaries = verdict.integrity.evidence.filter((evidence) => evidence.rule === "canary");
  return (
    <Card
      title="Tests that decide"
      note={`${count(verdict.tests.length - failed.length)} passed, ${count(failed.length)} did not; checks ran ${duration(verdict.checks_s)}`}
    >
      {verdict.reused_from !== null && <Reused store={store} source={verdict.reused_from} />}
      {canaries.map((evidence, index) => (
        <p key={index}>
          <Badge tone="bad">canary tests</Badge> <Text>{evidence.text ?? ""}</Text>
        </p>
      ))}
      {failed.length > 0 && (
        <Toolbar>
          <Button aria-pressed={onlyFailed} onClick={() => setUrl({ tests: onlyFailed ? undefined : "failed" })}>
            Only what did not pass
          </Button>
        </Toolbar>
      )}
      {verdict.tests.length > 0 && (
        <table className={styles.tests}>
          <thead>
            <tr>
              <th scope="col">Test</th>
              <th scope="col">Without the patch</th>
              <th scope="col">With it</th>
              {isRegraded && <th scope="col">In the verdict before</th>}
            </tr>
          </thead>
          <tbody>
            {shown.map((test, index) => (
              <tr key={index}>
                <td>
                  <Text>{test.id}</Text>
                </td>
                <td>{test.unpatched ?? "–"}</td>
                <td>
                  <Badge tone={GOOD.includes(test.outcome) ? "good" : "bad"}>{test.outcome}</Badge>
                </td>
                {isRegraded && <td>{test.regraded ?? "–"}</td>}
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {more}
    </Card>
  );
}

function Output({ title, text }: { title: string; text: string }) {
  return (
    <details className={styles.log}>
      <summary>
        {title} <span>{bytes(text.length)}</span>
      </summary>
      <pre>
        <Text>{terminalText(text)}</Text>
      </pre>
    </details>
  );
}

function LogFile({ body, name }: { body: RolloutKey; name: string }) {
  const [url, setUrl] = useUrlState();
  const result = useQuery(logQuery(body, name, Number(url["offset"] ?? 0) || 0));
  return (
    <Loaded result={result}>
      {(range) => (
        <>
          <pre className={styles.plain}>
            <Text>{terminalText(range.text)}</Text>
          </pre>
          {range.next !== null && (
            <Button onClick={() => setUrl({ offset: String(range.next) })}>
              Go on: {bytes(range.offset + range.text.length)} of {bytes(range.size)}
            </Button>
          )}
        </>
      )}
    </Loaded>
  );
}

/** What the attempt changed, what the hidden tests say of it, and what was logged. */
export function PatchPage({ body, head }: { body: RolloutKey; head: RolloutHead }) {
  const [url, setUrl] = useUrlState();
  const { verdict, task } = head;
  const showsGold = url["patch"] === "gold";
  return (
    <div className={styles.page}>
      <div className={styles.main}>
        {task !== null && (
          <Toolbar>
            <Button aria-pressed={!showsGold} onClick={() => setUrl({ patch: undefined })}>
              The rollout's patch
            </Button>
            <Button aria-pressed={showsGold} onClick={() => setUrl({ patch: "gold" })} disabled={task.gold_patch === ""}>
              Gold patch
            </Button>
          </Toolbar>
        )}
        {showsGold && task !== null ? <Patch text={task.gold_patch} /> : <OwnPatch body={body} />}
      </div>
      <div className={styles.side}>
        {task !== null && (
          <Card title="Task" note={<Text>{task.repo}</Text>}>
            <pre className={styles.instruction}>
              <Text>{task.instruction}</Text>
            </pre>
          </Card>
        )}
        {verdict !== null && <Tests store={body.store} verdict={verdict} />}
        {verdict !== null && verdict.log !== "" && <Output title="Output of the checks" text={verdict.log} />}
        {verdict !== null && verdict.commands.length > 0 && (
          <Output title="Commands of the checks" text={verdict.commands.join("\n")} />
        )}
        {Object.keys(head.logs).length > 0 && (
          <Card title="Logs of the attempt">
            <div className={styles.names}>
              {Object.entries(head.logs).map(([name, size]) => (
                <Button
                  key={name}
                  aria-pressed={url["log"] === name}
                  onClick={() => setUrl({ log: url["log"] === name ? undefined : name, offset: undefined })}
                >
                  <Text>{name}</Text> {bytes(size)}
                </Button>
              ))}
            </div>
            {url["log"] !== undefined && <LogFile body={body} name={url["log"]} />}
          </Card>
        )}
      </div>
    </div>
  );
}
