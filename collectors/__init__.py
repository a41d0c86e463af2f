"""The built-in collectors. Each imports `agent.api` and `agent.hw` only, and never another."""
