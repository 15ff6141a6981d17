import { useQuery } from "@tanstack/react-query";
import { imageQuery, type RolloutKey } from "../../api/queries";
import { source } from "../../api/source";
import type { BlockView } from "../../api/types";
import { Text } from "../../components/Text";
import { bytes } from "../../text/format";
import { isPicture, whyHidden } from "./image";
import styles from "./Block.module.css";

type ImageView = BlockView["images"][number];

/** An image that an agent or a tool gave to the model: its data comes from the store, and is drawn as a picture only. */
export function Image(props: { body: RolloutKey; block: string; index: number; image: ImageView }) {
  const { image } = props;
  const hidden = source.isServer ? whyHidden(image) : "images are not in a saved copy";
  const result = useQuery({ ...imageQuery(props.body, props.block, props.index), enabled: hidden === null });
  const why = hidden ?? result.error?.message ?? (result.data !== undefined && !isPicture(result.data) ? "it is damaged" : null);
  return (
    <figure className={styles.image}>
      {why === null && result.data !== undefined && (
        <img src={result.data} alt={`Image ${props.index + 1}`} decoding="async" />
      )}
      <figcaption className={styles.title}>
        Image <Text>{image.media_type}</Text> {image.size > 0 && bytes(image.size)}
        {why !== null && `, not shown: ${why}`}
      </figcaption>
    </figure>
  );
}
