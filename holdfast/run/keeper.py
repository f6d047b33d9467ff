"""The entry of the keeper's process: what it is asked, and what it answers, as messages.

It lives in a session of its own. When its driver is gone, it finishes what it was asked for and ends.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast.checkpoint.keeper import Keeper
from holdfast.engines.base import Channel, ChannelClosed
from holdfast.plain import Plain, decode, encode

_AT_ONCE = 2  # the parts of two ranks; more would only share the disk


def main(channel: Channel, payload: bytes) -> None:
    """Serves requests until the driver is gone."""
    keeper = Keeper()
    with ThreadPoolExecutor(_AT_ONCE) as pool, contextlib.suppress(ChannelClosed):  # leaving the pool finishes its work
        while True:
            request = channel.receive()
            if request is not None:
                pool.submit(_serve, keeper, channel, decode(request))


def ask(number: int, rank: int, part: Path) -> bytes:
    """Returns the message that asks the keeper to make a part durable."""
    return encode({"number": number, "rank": rank, "part": str(part)})


def _serve(keeper: Keeper, channel: Channel, request: Plain) -> None:
    failure = keeper.persist(Path(request["part"]))
    answer = {"number": request["number"], "rank": request["rank"]}
    if failure is not None:
        answer.update(error=failure.reason, passing=failure.passing)
    with contextlib.suppress(ChannelClosed):
        channel.send(encode(answer))
