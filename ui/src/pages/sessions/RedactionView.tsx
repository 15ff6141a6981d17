import { useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";
import { redactionQuery } from "../../api/sessionQueries";
import { Badge, Empty } from "../../components/marks";
import { Card } from "../../components/Page";
import { Loaded } from "../../components/Query";
import { Text } from "../../components/Text";
import { bytes, count, counted } from "../../text/format";
import styles from "../store/HealthView.module.css";

/** What redaction would replace, shown before anything is exported. */
export function RedactionView() {
  const { store } = useParams({ from: "/s/$store" });
  const result = useQuery(redactionQuery(store));
  return (
    <Loaded result={result}>
      {(view) => (
        <div className={styles.page}>
          <Card
            title="What redaction would replace in the conversations"
            note={
              <span role="status">
                {view.complete
                  ? `searched all: ${counted(view.conversations, "conversation")}, ${bytes(view.characters)}`
                  : `searching: ${counted(view.conversations, "conversation")} so far, ${bytes(view.characters)}; the store has ${count(view.total)} conversations and rollouts`}
              </span>
            }
          >
            {Object.keys(view.replaced).length === 0 ? (
              <Empty>{view.complete ? "Redaction would replace nothing in the conversations." : "Nothing found so far."}</Empty>
            ) : (
              <table className={styles.table}>
                <thead>
                  <tr>
                    <th scope="col">Rule</th>
                    <th scope="col">Replacements</th>
                    <th scope="col">Different values</th>
                  </tr>
                </thead>
                <tbody>
                  {Object.entries(view.replaced).map(([rule, amount]) => (
                    <tr key={rule}>
                      <td>
                        <Text>{rule}</Text>
                      </td>
                      <td>{count(amount)}</td>
                      <td>{count(view.values[rule])}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            )}
          </Card>
          {view.samples.length > 0 && (
            <Card title="Some of them, redacted">
              {view.samples.map((sample, index) => (
                <p key={index} className={styles.sample}>
                  <Badge tone="warn">{sample.rule}</Badge> <Text>{sample.context}</Text>
                </p>
              ))}
            </Card>
          )}
        </div>
      )}
    </Loaded>
  );
}
