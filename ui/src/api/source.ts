import createClient from "openapi-fetch";
import { embeddedData, embeddedFetch, holdsAnswer } from "./embedded";
import type { paths } from "./schema";
import type { ErrorAnswer } from "./types";

/** What the page reads from: a running server, or the data of the one file that `understudy view --export` wrote. */
export type DataSource = {
  /** Answers requests for paths of the API, as `window.fetch` does. */
  fetch: (request: Request) => Promise<Response>;
  /** The address that the API's paths are relative to. */
  origin: string;
  /** There are events about changes, and orders can be sent. */
  isServer: boolean;
  /** Whether there is an answer at a path of the API; a server has all of them. */
  holds: (path: string) => boolean;
  /** The page that is shown first. */
  start: string;
};

function openSource(): DataSource {
  const data = embeddedData(document);
  if (data === null) {
    const fetch = (request: Request) => window.fetch(request);
    return { fetch, origin: window.location.origin, isServer: true, holds: () => true, start: "/" };
  }
  const holds = (path: string) => holdsAnswer(data, path);
  return { fetch: embeddedFetch(data), origin: "http://file.invalid", isServer: false, holds, start: data.start ?? "/" };
}

export const source = openSource();
export const api = createClient<paths>({ baseUrl: source.origin, fetch: source.fetch });

/** An answer with an error: what went wrong, and what to do about it. */
export class ApiError extends Error {
  constructor(
    readonly type: string,
    message: string,
    readonly remedy: string,
  ) {
    super(message);
  }
}

/** Returns the data of an answer; raises `ApiError` with the server's words, or with ours if none came. */
export async function answer<Data>(
  request: Promise<{ data?: Data; error?: ErrorAnswer | undefined; response: Response }>,
): Promise<Data> {
  let result;
  try {
    result = await request;
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(
      "unreachable",
      "The server of this page does not answer.",
      "Look whether `understudy view` still runs, start it again, and reload the page.",
    );
  }
  if (result.data !== undefined) return result.data;
  const body = result.error?.error;
  if (body !== undefined) throw new ApiError(body.type, body.message, body.remedy);
  throw new ApiError("unreadable", `The server answered with status ${result.response.status}.`, "Reload the page.");
}
