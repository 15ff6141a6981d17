"""Chooses the model for a request by the model name in it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import MappingProxyType

from understudy.errors import ConfigError
from understudy.gateway.backends.base import Backend, Relay, is_relay
from understudy.gateway.fair_slots import FairSlots

HIGH, LOW = "high", "low"

_NO_NAMES: Mapping[str, str] = MappingProxyType({})
_NO_SLOTS: Mapping[str, FairSlots] = MappingProxyType({})


class ModelRouter:
    """Two models, high and low; without a low model, the high one serves as both.

    `names` maps further names to "high" or "low". A model can also be requested by its own name; any other name
    means the high one. `slots` limits how many requests a model answers at once, by "high" and "low". Raises
    ConfigError if a name is mapped to anything else.
    """

    def __init__(
        self,
        high: Backend | Relay,
        low: Backend | Relay | None = None,
        names: Mapping[str, str] = _NO_NAMES,
        *,
        slots: Mapping[str, FairSlots] = _NO_SLOTS,
    ) -> None:
        self._roles = {HIGH: high, LOW: low or high}
        self._slots = {id(self._roles[role]): fair_slots for role, fair_slots in slots.items()}
        self.has_relay = any(map(is_relay, self._roles.values()))
        """Whether one of the models is a relay, which takes requests without parsing them."""
        # A relay that keeps the agent's model name has no name itself.
        by_model = {server.model: server for server in (self._roles[LOW], high) if server.model}
        self._table = by_model | self._roles
        for name, role in names.items():
            if role not in self._roles:
                raise ConfigError(
                    f"names.{name}: got {role!r}, expected {HIGH!r} or {LOW!r}; name one of these roles"
                )
            self._table[name] = self._roles[role]

    def server_for(self, requested: str) -> Backend | Relay:
        """Return the backend or relay for the model name in a request."""
        return self._table.get(requested, self._roles[HIGH])

    def slots_of(self, server: Backend | Relay) -> FairSlots | None:
        """Return the limit on how many requests a model answers at once, or None."""
        return self._slots.get(id(server))

    def names(self) -> list[str]:
        """The names that the router maps, sorted. Any other name means "high"."""
        return sorted(self._table)

    def servers(self) -> list[Backend | Relay]:
        """Return each model once, the high one first."""
        high, low = self._roles[HIGH], self._roles[LOW]
        return [high] if low is high else [high, low]

    async def close(self) -> None:
        """Close the connections of all models. May be called twice."""
        async with AsyncExitStack() as stack:  # all are closed, even if this is cancelled
            for server in self.servers():
                stack.push_async_callback(server.close)
