"""Opens the publisher that settings name; the settings are vLLM's for KV events, and so are their defaults but for
the endpoint, which is on the loopback where none is given.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.errors import ConfigError
from kvist.wire.publishing import NullPublisher, Publisher

__all__ = ["EventsConfig", "open_publisher"]


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """Whether and how events are published: see `ZmqPublisher`.

    `publisher` is "zmq" or "null"; None is "zmq" if `enabled`, else "null". What is not enabled is never published. To
    publish to other machines, as vLLM does without being told, give the endpoint `tcp://*:5557`.

    >>> EventsConfig(enabled=True).publisher_name
    'zmq'
    """

    enabled: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        if self.publisher not in (None, "zmq", "null"):
            raise ConfigError([f"publisher is {self.publisher!r}, must be 'zmq', 'null' or None"])

    @property
    def publisher_name(self) -> str:
        """The publisher that is opened."""
        return (self.publisher or "zmq") if self.enabled else "null"


def open_publisher(config: EventsConfig, rank: int = 0) -> Publisher:
    """Open what the settings name, for one data-parallel rank.

    Raises:
        ModuleNotFoundError: ZeroMQ is wanted and not installed; the message names the extra.
        ArgumentError: the rank has no endpoint, or a limit is out of range.
    """
    if config.publisher_name == "null":
        return NullPublisher()
    from kvist.wire.zmq import ZmqPublisher

    return ZmqPublisher(
        config.endpoint,
        replay_endpoint=config.replay_endpoint,
        rank=rank,
        topic=config.topic,
        hwm=config.hwm,
        max_queue_size=config.max_queue_size,
        buffer_steps=config.buffer_steps,
    )
