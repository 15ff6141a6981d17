/** Larger images are not read: a page of turns may have many. */
const MOST_BYTES = 4_000_000;

/** What a browser draws without running anything. An SVG is a document, and is not among them. */
const PICTURES = ["image/png", "image/jpeg", "image/gif", "image/webp"];

/** Returns why an image is not shown; null for one that is. */
export function whyHidden(image: { media_type: string; size: number }): string | null {
  if (image.media_type === "") return "it is at another address";
  if (!PICTURES.includes(image.media_type)) return "only PNG, JPEG, GIF and WebP are";
  if (image.size > MOST_BYTES) return "it is too large";
  return null;
}

/** Whether a text is the data URL of a picture and nothing else. */
export function isPicture(url: string): boolean {
  const [head, data, ...more] = url.split(",");
  const type = /^data:(image\/[a-z]+);base64$/.exec(head ?? "")?.[1];
  return type !== undefined && PICTURES.includes(type) && more.length === 0 && /^[A-Za-z0-9+/]+={0,2}$/.test(data ?? "");
}
