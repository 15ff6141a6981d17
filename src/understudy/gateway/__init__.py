"""The gateway: agents ask as they would their provider, a model of ours answers, every call is kept before that.

The way of a request: `listen` (sockets) → `app` (routes) → `http` (one request) → `keys` (whose it is) →
`wire/` (what is asked) → `capture` (one call; `job` says how it is answered) → `backends/` or `exact/`.

What holds a request back: `control` (pauses, policy versions), `budget`, `fair`. What goes wrong: `faults`. How it
is set up: `config`, `models`, `prices`; `build` and `opened` make a gateway of them. `telemetry/` tells of the
calls, and `serve/` runs a gateway alone, in processes of its own.
"""
