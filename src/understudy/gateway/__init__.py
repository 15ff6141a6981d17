"""The gateway: agents call it as they would call their provider, a model answers, and every call is stored before
its response is sent.

The path of a request: `server/listen` (sockets) → `server/app` (routes) → `server/http` (one HTTP request) →
`keys` and `session` (which attempt) → `wire` (parsing) → `server/capture` (one call; `server/request` says how it
is answered) → `backends/` or `exact/`. What can hold a request back: `control` (pauses, policy versions),
`budget`, `fair_slots`. Failures: `errors`. `config`, `router` and `prices` define the setup, from which `factory`
makes a gateway. `telemetry/` exports the calls, and `serve/` runs a gateway alone, in processes of its own.
"""
