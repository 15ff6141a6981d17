import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";

const server = process.env["UNDERSTUDY_VIEW"] ?? "http://127.0.0.1:8585";

export default defineConfig({
  plugins: [react()],
  // Pages have paths of any depth, so their assets are named by absolute paths.
  base: "/",
  build: {
    outDir: "../src/understudy/view/assets",
    emptyOutDir: true,
    target: "es2022",
    cssCodeSplit: false,
    modulePreload: false,
    reportCompressedSize: false,
    // The licences of the packages whose code is in the bundle ask to go along with it.
    license: { fileName: "assets/licenses.md" },
    assetsInlineLimit: 0,
    rolldownOptions: {
      output: {
        // One script and one stylesheet: what `understudy view --export` inlines. The names are fixed, so that a
        // rebuild changes the files it has to change and no others.
        codeSplitting: false,
        entryFileNames: "assets/viewer.js",
        assetFileNames: "assets/viewer[extname]",
      },
    },
  },
  server: {
    host: "127.0.0.1",
    proxy: {
      // The server checks Host and Origin exactly, so requests that pass through here carry its own.
      "/api": { target: server, changeOrigin: true, headers: { origin: server } },
    },
  },
  // A machine may be busy with other work, so only a test that hangs is ended.
  test: { include: ["src/**/*.test.ts"], testTimeout: 60_000 },
});
