"""The gateway: agents call it as they would their provider, a model answers, and every call is stored before that.

The path of a request: `server/listen` (sockets) → `server/app` (routes) → `server/http` (one request) → `keys` and
`session` (whose it is) → `wire` (what it asks) → `server/capture` (one call; `server/request` says how it is
answered) → `backends/` or `exact/`.

What holds a request back: `control` (pauses, policy versions), `budget`, `fair_slots`. What goes wrong: `errors`.
`config`, `router` and `prices` set it up, `factory` makes a gateway of them. `telemetry/` exports the calls, and
`serve/` runs a gateway alone, in processes of its own.
"""
