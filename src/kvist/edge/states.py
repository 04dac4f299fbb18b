"""The recurrent and convolution states of all slots, and those that verifying drafts keeps by token."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from kvist.core.arguments import as_count
from kvist.edge.config import RecurrentConfig
from kvist.edge.mappings import Survivors, check_slot
from kvist.errors import ArgumentError, LayoutError
from kvist.memory.rows import Rows

__all__ = ["RecurrentStates"]


class RecurrentStates:
    """States of the recurrent layers of every slot, zeros at first; Edge-LLM's `MambaCacheManager`.

    Of each layer `recurrent(layer)` is `[max_batch_size, num_heads, head_dim, state_size]` and `conv(layer)`
    `[max_batch_size, conv_dim, conv_kernel]`, of their own dtypes. With `max_verify_tokens`, a verification of drafts
    writes the states after each token to `verified(layer)`, and `accept` or `accept_tree` takes the one to go on from.

    Raises `ConfigError` for a config that makes no sense.
    """

    def __init__(self, config: RecurrentConfig, device: str | torch.device = "cpu") -> None:
        config.validate()
        self.config = config
        self.device = torch.device(device)
        self._verify_shape = (config.max_batch_size, config.max_verify_tokens)
        shapes = {config.state_shape: config.dtype, config.conv_shape: config.conv_dtype}
        num_verified = config.max_batch_size * config.max_verify_tokens
        with torch.inference_mode(mode=False):
            self._kept = [self._planes(config.max_batch_size, shapes) for _ in range(self.num_layers)]
            self._verified = [self._planes(num_verified, shapes) for _ in range(self.num_layers)]

    def _planes(self, num_rows: int, shapes: dict[tuple[int, ...], str]) -> list[Tensor]:
        """Make zeros `[num_rows, *shape]` of each shape."""
        return [
            torch.zeros((num_rows, *shape), dtype=getattr(torch, dtype), device=self.device)
            for shape, dtype in shapes.items()
        ]

    @property
    def num_layers(self) -> int:
        """Recurrent layers."""
        return self.config.num_recurrent_layers

    def recurrent(self, layer: int) -> Tensor:
        """Return a layer's states, `[max_batch_size, num_heads, head_dim, state_size]`; `getRecurrentState`."""
        return self._of(self._kept, layer)[0]

    def conv(self, layer: int) -> Tensor:
        """Return a layer's convolution inputs, `[max_batch_size, conv_dim, conv_kernel]`; `getConvState`."""
        return self._of(self._kept, layer)[1]

    def clear(self, slot: int | None = None) -> None:
        """Fill the states of a slot, or of all, with zeros; `clearStates`."""
        if slot is not None:
            check_slot(slot, self.config.max_batch_size)
        for plane in self._all():
            (plane if slot is None else plane[slot]).zero_()

    def compact(self, survivors: Survivors) -> None:
        """Move the states of rows that go on to where they go on."""
        sources = torch.tensor(survivors.sources, dtype=torch.int64).to(self.device, non_blocking=True)
        for plane in self._all():
            plane[: len(sources)] = plane[sources]

    # ---- saved states -----------------------------------------------------------------------------------------------

    def capture(self, slot: int) -> tuple[list[Tensor], list[Tensor]]:
        """Copy a slot's recurrent states, `[1, num_heads, head_dim, state_size]` of each layer, and its convolutions'.

        `captureRecurrentStates` and `captureConvStates`.
        """
        check_slot(slot, self.config.max_batch_size)
        recurrent, conv = ([planes[at][slot : slot + 1].clone() for planes in self._kept] for at in (0, 1))
        return recurrent, conv

    def restore(self, recurrent: Sequence[Tensor], conv: Sequence[Tensor], slot: int) -> None:
        """Write captured states to a slot. Raises `LayoutError`, before anything is written, where they do not fit."""
        check_slot(slot, self.config.max_batch_size)
        self.check_saved(recurrent, conv)
        for planes, *saved in zip(self._kept, recurrent, conv, strict=True):
            for plane, state in zip(planes, saved, strict=True):
                plane[slot].copy_(state[0])

    def check_saved(self, recurrent: Sequence[Tensor], conv: Sequence[Tensor]) -> None:
        """Raise `LayoutError` unless captured states are such as there are here."""
        for name, at, states in (("recurrent", 0, recurrent), ("conv", 1, conv)):
            expected = [((1, *planes[at].shape[1:]), planes[at].dtype) for planes in self._kept]
            if (got := [(tuple(state.shape), state.dtype) for state in states]) != expected:
                raise LayoutError(f"{name} states are {got}, must be {expected}")

    # ---- drafts -----------------------------------------------------------------------------------------------------

    def verify(self, num_active: int, num_tokens: int) -> None:
        """Have a verification of this many rows and tokens next; `reshapeIntermediateStates`.

        Raises `ArgumentError` where there is no room for that many.
        """
        limits = (self.config.max_batch_size, self.config.max_verify_tokens)
        asked = (as_count(num_active, "num_active"), as_count(num_tokens, "num_tokens"))
        if asked[0] > limits[0] or asked[1] > limits[1]:
            raise ArgumentError(
                f"{asked[0]} rows of {asked[1]} tokens, but there is room for {limits[0]} of {limits[1]}"
            )
        self._verify_shape = asked

    def verified(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return where the states after each token of a verification go, recurrent and convolution.

        They are `[num_active, num_tokens, *axes of a state]`, contiguous, views of the same memory for every shape.
        """
        planes = self._of(self._verified, layer)
        recurrent, conv = (
            plane[: prod(self._verify_shape)].view(*self._verify_shape, *plane.shape[1:]) for plane in planes
        )
        return recurrent, conv

    def accept(self, num_accepted: Tensor) -> None:
        """Go on from the state after the last of `num_accepted`, int32 `[num_active]`, tokens; 0 leaves a row.

        `scatterAcceptedLinearStates`. Numbers on an accelerator are not looked at.
        """
        self._take(num_accepted.to(torch.int64) - 1)

    def accept_tree(self, nodes: Tensor, num_accepted: Tensor) -> None:
        """Go on from the state of the last accepted node of a tree; -1 and 0 leave a row.

        `nodes` is int32 `[num_active, max_accepted]`, `num_accepted` `[num_active]`; `scatterAcceptedTreeStates`.
        """
        if nodes.ndim != 2 or num_accepted.ndim != 1 or len(nodes) != len(num_accepted):
            raise ArgumentError(f"nodes {list(nodes.shape)} and num_accepted {list(num_accepted.shape)} do not fit")
        last = num_accepted.to(torch.int64)[:, None] - 1
        chosen = nodes.to(torch.int64).gather(1, last.clamp(0, nodes.shape[1] - 1))
        self._take(torch.where(last >= 0, chosen, -1)[:, 0])

    def _take(self, tokens: Tensor) -> None:
        """Take for each row the state after a token, int64 `[num_active]`, -1 for those that keep theirs."""
        num_active, num_tokens = self._verify_shape
        if tokens.shape != (num_active,):
            raise ArgumentError(f"num_accepted has shape {list(tokens.shape)}, must be [{num_active}] as verified")
        if (
            tokens.device.type == "cpu"
            and len(tokens)
            and not -1 <= int(tokens.min()) <= int(tokens.max()) < num_tokens
        ):
            raise ArgumentError(f"accepted tokens are {tokens.tolist()}, verified are {num_tokens} a row")
        if num_active * num_tokens == 0:
            return
        rows = torch.arange(num_active, device=self.device)
        sources = (rows * num_tokens + tokens).clamp(min=0)
        destinations = torch.where(tokens >= 0, rows, -1)
        for kept, verified in zip(self._kept, self._verified, strict=True):
            for plane, states in zip(kept, verified, strict=True):
                Rows(plane).write_kept(destinations, states.index_select(0, sources))

    def _all(self) -> list[Tensor]:
        return [plane for planes in self._kept for plane in planes]

    def _of(self, planes: list[list[Tensor]], layer: int) -> list[Tensor]:
        if not 0 <= layer < self.num_layers:
            raise ArgumentError(f"layer must be in [0, {self.num_layers}), got {layer}")
        return planes[layer]
