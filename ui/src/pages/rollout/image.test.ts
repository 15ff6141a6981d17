import { expect, test } from "vitest";
import { isPicture, whyHidden } from "./image";

test("pictures of a bounded size are shown, documents and addresses are not", () => {
  expect(whyHidden({ media_type: "image/png", size: 10 })).toBeNull();
  expect(whyHidden({ media_type: "image/svg+xml", size: 10 })).toMatch(/only PNG/);
  expect(whyHidden({ media_type: "text/html", size: 10 })).toMatch(/only PNG/);
  expect(whyHidden({ media_type: "", size: 0 })).toMatch(/another address/);
  expect(whyHidden({ media_type: "image/gif", size: 5_000_000 })).toMatch(/too large/);
});

test("only a data URL of a picture is given to the browser", () => {
  expect(isPicture("data:image/png;base64,iVBORw0KGgo=")).toBe(true);
  for (const url of [
    "data:image/svg+xml;base64,PHN2Zz4=",
    "data:image/png;base64,<svg onload=alert(1)>",
    "data:text/html;base64,PHN2Zz4=",
    "data:image/png,abc",
    "data:image/png;base64,",
    "https://example.org/a.png",
    "javascript:alert(1)",
    "",
  ])
    expect(isPicture(url)).toBe(false);
});
