import "./stripToken";
import { QueryCache, QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { RouterProvider } from "@tanstack/react-router";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { ApiError } from "./api/source";
import { router } from "./router";
import "./styles/base.css";

const client: QueryClient = new QueryClient({
  queryCache: new QueryCache({
    // A list whose next page is refused, as after an upgrade of the server, is read again from its first page.
    onError: (error, query) => {
      if (error instanceof ApiError && error.type === "cursor") void client.resetQueries({ queryKey: query.queryKey, exact: true });
    },
  }),
  defaultOptions: {
    queries: {
      // The server says when a store has changed; nothing is read again for any other reason.
      staleTime: Infinity,
      refetchOnWindowFocus: false,
      retry: (failures, error) => error instanceof ApiError && error.type === "unreachable" && failures < 2,
    },
  },
});

const root = document.getElementById("root");
if (root === null) throw new Error('index.html has no element with the id "root"');
createRoot(root).render(
  <StrictMode>
    <QueryClientProvider client={client}>
      <RouterProvider router={router} />
    </QueryClientProvider>
  </StrictMode>,
);
