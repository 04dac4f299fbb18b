"""What a ValkeyStore asks: one server, or the nodes of a cluster at the same time, each for what it has.

What must not be broken: a node that hangs, fails or is gone costs what it has, and no answer of the others. `redis` has
pipelines for clusters, but these raise for all when one node is gone, and ask a node that hangs for each key again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import redis
from redis.cluster import RedisCluster
from redis.exceptions import AskError, RedisClusterException, RedisError, ResponseError

from kvist.tiers.breaker import CircuitBreaker

__all__ = ["ClusterNodes", "OneServer"]

Command = tuple[Any, ...]
"""A command's name, its key, and other arguments."""
_FORGOTTEN_AT_ONCE = 1000
_log = logging.getLogger("kvist.tiers")


class OneServer:
    """A server that has all keys."""

    def __init__(self, url: str, **settings: Any) -> None:
        self._client: Any = redis.Redis.from_url(url, **settings)

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one round trip, and return the answer or error of each."""
        with self._client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return list(pipe.execute(raise_on_error=False))

    def forget(self, pattern: str) -> None:
        """Remove all keys of a pattern."""
        _forget(self._client, pattern)

    def close(self) -> None:
        """Close all sockets."""
        self._client.close()


class ClusterNodes:
    """The nodes of a cluster. One that has failed is not asked for some time; then a call tries it, one at a time."""

    def __init__(self, url: str, **settings: Any) -> None:
        self._client: Any = RedisCluster.from_url(url, **settings)
        self._failing: dict[str, CircuitBreaker] = {}

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands to all nodes before the first answer is waited for; return the answer or error of each."""
        answers: list[Any] = [None] * len(commands)
        shares = self._admitted(self._shared_out(commands, answers))
        try:
            for share in shares:
                share.act(share.send)
            for share in shares:
                share.act(share.receive)
        finally:
            for share in shares:
                share.end()
        for share in shares:
            self._note(share)
            for at, answer in zip(share.places, share.answers, strict=True):
                answers[at] = answer
        return self._redirected(commands, answers)

    def forget(self, pattern: str) -> None:
        """Remove all keys of a pattern from all nodes that can be asked; then raise what another has failed with."""
        nodes = self._client.get_primaries()
        shares = self._admitted([_Share(node.name, self._client.get_redis_connection(node)) for node in nodes])
        for share in shares:
            share.act(partial(_forget, share.server, pattern))
            self._note(share)
        for share in shares:
            if share.failure is not None:
                raise share.failure

    def close(self) -> None:
        """Close the sockets to all nodes."""
        self._client.close()

    def _shared_out(self, commands: Sequence[Command], answers: list[Any]) -> list[_Share]:
        """Give each command to the node that has its key; where none has, that is the answer."""
        shares: dict[str, _Share] = {}
        for at, command in enumerate(commands):
            try:
                node = self._client.get_node_from_key(command[1])
            except RedisClusterException as error:
                answers[at] = error
                continue
            if node.name not in shares:
                shares[node.name] = _Share(node.name, self._client.get_redis_connection(node))
            shares[node.name].places.append(at)
            shares[node.name].commands.append(command)
        return list(shares.values())

    def _admitted(self, shares: list[_Share]) -> list[_Share]:
        """Let the shares of nodes that fail have failed already, but for one whose time to be tried has come."""
        is_tried = False
        for share in shares:
            breaker = self._failing.get(share.name)
            if breaker is None:
                continue
            if not is_tried and breaker.admits():
                is_tried = True
            else:
                share.refuse()
        return shares

    def _note(self, share: _Share) -> None:
        """Remember whether a node fails, and if it does, ask another one who has its keys by now."""
        if share.is_refused:
            return
        if share.failure is None:
            self._failing.pop(share.name, None)
            return
        if self._failing.setdefault(share.name, CircuitBreaker(num_failures=1)).note_failure():
            _log.warning("%s failed (%s), and is not asked for some time", share.name, share.failure)
        with suppress(RedisError, RedisClusterException):
            self._client.nodes_manager.initialize(last_failed_node_name=share.name)

    def _redirected(self, commands: Sequence[Command], answers: list[Any]) -> list[Any]:
        """Ask again, one by one, for keys that are on another node than was known; fail with the first that fails."""
        failure: Exception | None = None
        for at, answer in enumerate(answers):
            if not isinstance(answer, AskError):
                continue
            try:
                answers[at] = failure or self._client.execute_command(*commands[at])
            except ResponseError as error:
                answers[at] = error
            except (RedisError, RedisClusterException) as error:
                answers[at] = failure = error
        return answers


class _Share:
    """What one node is asked, on a connection of its own, and what came of it."""

    def __init__(self, name: str, server: Any) -> None:
        self.name, self.server = name, server
        self.places: list[int] = []
        self.commands: list[Command] = []
        self.failure: Exception | None = None
        self.is_refused = False
        self._received: list[Any] = []
        self._connection: Any = None

    @property
    def answers(self) -> list[Any]:
        return self._received if self.failure is None else [self.failure] * len(self.places)

    def act(self, act: Callable[[], object]) -> None:
        """Do something with the node, unless something has failed; keep what it fails with."""
        if self.failure is None:
            try:
                act()
            except RedisError as error:
                self.failure = error

    def refuse(self) -> None:
        self.failure = redis.ConnectionError(f"{self.name} has failed, and is not asked for some time")
        self.is_refused = True

    def send(self) -> None:
        self._connection = self.server.connection_pool.get_connection()
        self._connection.send_packed_command(self._connection.pack_commands(self.commands))

    def receive(self) -> None:
        self._received = [self._answer(command) for command in self.commands]
        self.server.connection_pool.release(self._connection)
        self._connection = None

    def end(self) -> None:
        """Close a connection on which answers may still come: the next to use it would take them for its own."""
        if self._connection is not None:
            self._connection.disconnect()
            self.server.connection_pool.release(self._connection)
            self._connection = None

    def _answer(self, command: Command) -> Any:
        try:
            return self.server.parse_response(self._connection, command[0])
        except ResponseError as error:
            return error


def _forget(server: Any, pattern: str) -> None:
    """Remove all keys of a pattern from one server."""
    names = server.scan_iter(match=pattern, count=_FORGOTTEN_AT_ONCE)
    while some := list(islice(names, _FORGOTTEN_AT_ONCE)):
        with server.pipeline(transaction=False) as pipe:
            for name in some:
                pipe.execute_command("UNLINK", name)
            pipe.execute()
