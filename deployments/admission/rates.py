"""Rate limits of one tenant, in requests and tokens per minute. The caller passes the time."""

from __future__ import annotations

import math

from cfg_core.errors import OverloadedError, RequestError

MINUTE_S = 60.0
ROUNDING_S = 1e-6
"""Tolerance in seconds, because times and waits are floats.

A client that waits exactly as long as it was told may seem to come this much too soon.
"""


class Bucket:
    """A token bucket that holds at most `per_minute` units and is refilled evenly within a minute.

    Its state is the time at which it will be full again, so nothing has to refill it.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self.full_at_s = -math.inf
        self.corrected_s = 0.0  # refill time of all upward corrections

    def wait_s(self, amount: int, now_s: float) -> float:
        """Seconds until the bucket holds `amount`; 0 if it does now.

        amount: at most `per_minute`.
        """
        wait_s = self.full_at_s - now_s + self._refill_s(amount) - MINUTE_S
        return wait_s if wait_s > ROUNDING_S else 0.0

    def take(self, amount: int, now_s: float) -> None:
        """Take `amount` without a check that the bucket holds it; `wait_s` is the check."""
        self.full_at_s = max(self.full_at_s, now_s) + self._refill_s(amount)

    def correct(self, amount: int, now_s: float) -> None:
        """Take `amount` more after the fact, or give it back if negative. The bucket may owe."""
        self.take(amount, now_s)
        self.corrected_s += max(0.0, self._refill_s(amount))

    def check_integrity(self, now_s: float) -> None:
        assert self.full_at_s - now_s <= MINUTE_S + self.corrected_s + ROUNDING_S, (
            "more was taken than a bucket holds"
        )

    def _refill_s(self, amount: int) -> float:
        return amount * MINUTE_S / self.per_minute


class Rates:
    """The rates of one tenant.

    requests_per_minute, tokens_per_minute: None means no limit.
    now_s: seconds, always by the same clock, which never goes back.
    """

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        rates = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._buckets = {unit: Bucket(rate) for unit, rate in rates.items() if rate is not None}

    def charge(self, num_tokens: int, now_s: float) -> None:
        """Count one request of `num_tokens` tokens.

        If it raises, nothing is counted. Raises OverloadedError with the seconds after which this
        request would pass if no other comes in between. Raises RequestError if the request needs
        more tokens than a minute has, so that it would never pass.
        """
        assert num_tokens >= 0
        amounts = {"requests": 1, "tokens": num_tokens}
        for unit, bucket in self._buckets.items():
            if amounts[unit] > bucket.per_minute:
                raise _never(num_tokens, bucket.per_minute)
        self._refuse_early(amounts, now_s)
        for unit, bucket in self._buckets.items():
            bucket.take(amounts[unit], now_s)

    def correct(self, more_tokens: int, now_s: float) -> None:
        """Charge `more_tokens` after the fact, or give them back if negative."""
        if (bucket := self._buckets.get("tokens")) is not None:
            bucket.correct(more_tokens, now_s)

    def _refuse_early(self, amounts: dict[str, int], now_s: float) -> None:
        waits_s = {
            unit: bucket.wait_s(amounts[unit], now_s) for unit, bucket in self._buckets.items()
        }
        slowest = max(waits_s, key=waits_s.__getitem__, default=None)
        if slowest is not None and waits_s[slowest] > 0:
            raise _later(slowest, self._buckets[slowest].per_minute, waits_s[slowest])

    def check_integrity(self, now_s: float) -> None:
        """For tests: assert what must hold after each call."""
        for bucket in self._buckets.values():
            bucket.check_integrity(now_s)


def _never(num_tokens: int, per_minute: int) -> RequestError:
    """The error for a request that can never pass.

    One request never exceeds a limit on requests, so the limit must be the one on tokens.
    """
    asked = f"This request asks for {num_tokens} tokens (prompt and max_tokens, of all streams)"
    hint = "lower max_tokens, or send a shorter prompt"
    return RequestError(
        f"{asked}, and this API key may use {per_minute} per minute: {hint}.", "max_tokens"
    )


def _later(unit: str, per_minute: int, wait_s: float) -> OverloadedError:
    """The error for a request that comes too soon. Its text rounds up, as Retry-After does."""
    rate = f"This API key is limited to {per_minute} {unit} per minute"
    return OverloadedError(f"{rate}: try again in {math.ceil(wait_s)} s.", wait_s, "rate")
