"""Where an agent and the tests of its patch run: nothing leaves but the gateway's socket."""
