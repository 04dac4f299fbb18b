"""One forward call as the model is about to see it: which tokens come in which columns, checked, and cut if cached."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvist.errors import SequenceError
from kvist.serve.transformers.batch import Part

__all__ = ["Inputs"]

_SLICED = ("input_ids", "position_ids", "cache_position")
_TENSORS_UNDERSTOOD = {*_SLICED, "attention_mask", "logits_to_keep"}


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of one forward call, by name.

    Columns are positions in the left-padded batch, counted from its first forward: this call brings the columns
    `[first_column, first_column + num_query_columns)` of every row.
    """

    arguments: dict[str, Any]

    @classmethod
    def of(cls, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Name the positional arguments, and refuse inputs that K and V might depend on beside the token ids.

        Raises `SequenceError`.
        """
        named = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) if args else {}
        arguments = named | kwargs
        if not isinstance(arguments.get("input_ids"), Tensor):
            raise SequenceError("a PagedCache finds prefixes by their tokens: pass input_ids, not embeddings")
        foreign = sorted(
            name for name, value in arguments.items() if isinstance(value, Tensor) and name not in _TENSORS_UNDERSTOOD
        )
        if foreign:
            raise SequenceError(
                f"a PagedCache can't tell what {', '.join(foreign)} does to the keys and values; leave it out"
            )
        mask = arguments.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            raise SequenceError("attention_mask must be [batch, columns], zero on left padding and one elsewhere")
        return cls(arguments)

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Token ids `[B, S]`, on the host."""
        ids: Tensor = self.arguments["input_ids"]
        return ids.detach().cpu().numpy()

    @property
    def num_rows(self) -> int:
        """Rows of the batch, B."""
        return int(self.arguments["input_ids"].shape[0])

    @property
    def num_query_columns(self) -> int:
        """Columns that this call brings, S."""
        return int(self.arguments["input_ids"].shape[1])

    @property
    def first_column(self) -> int | None:
        """The column of the first token that is passed, or None where the caller leaves that to the cache."""
        mask, position_ids = self.arguments.get("attention_mask"), self.arguments.get("position_ids")
        if mask is not None:
            return int(mask.shape[1]) - self.num_query_columns
        # Without a mask nothing is padding, so the first token's position is its column.
        return None if position_ids is None else int(position_ids[0, 0])

    def max_skipped(self, model: Any) -> int:
        """How many leading columns may be left out and still all logits and states that were asked for are there."""
        kept = self.arguments.get("logits_to_keep")
        if not isinstance(kept, int) or kept < 1:
            return 0
        for name in ("output_hidden_states", "output_attentions"):
            asked = self.arguments.get(name)
            if getattr(model.config, name, False) if asked is None else asked:
                return 0
        return max(self.num_query_columns - kept, 0)

    def padding(self) -> npt.NDArray[np.int64]:
        """Columns of left padding `[B]` in a call that begins at column 0. Raises `SequenceError` for an empty row."""
        mask = self.arguments.get("attention_mask")
        if mask is None:
            return np.zeros(self.num_rows, dtype=np.int64)
        padding: npt.NDArray[np.int64] = (mask == 0).sum(dim=1).cpu().numpy()
        if (padding >= mask.shape[1]).any():
            raise SequenceError(
                f"row {int(padding.argmax())} of the batch has no token in columns 0 to {mask.shape[1] - 1}"
            )
        return padding

    def check(self, first_column: int, padding: npt.NDArray[np.int64]) -> None:
        """Refuse a mask or positions other than those that rows with this much left `padding` [B] have from here on.

        K and V are found again by tokens alone, which is right only if the n-th token of a row has position n and sees
        all tokens before it. Raises `SequenceError`.
        """
        mask, position_ids = self.arguments.get("attention_mask"), self.arguments.get("position_ids")
        pads = torch.as_tensor(padding)[:, None]
        num_columns = first_column + self.num_query_columns
        if padding.any() and (mask is None or position_ids is None):
            raise SequenceError("rows with padding need attention_mask and position_ids in every forward call")
        if mask is not None and not torch.equal(mask.cpu() != 0, torch.arange(num_columns) >= pads):
            raise SequenceError(
                "attention_mask must be zero on left padding only, one elsewhere: set tokenizer.padding_side = 'left'"
            )
        if position_ids is not None:
            expected = torch.arange(first_column, num_columns) - pads
            if position_ids.ndim != 2 or ((position_ids.cpu() != expected) & (expected >= 0)).any():
                raise SequenceError("position_ids must count the tokens of each row from 0, without its padding")

    def check_length(self, num_skippable: int, max_chunk_tokens: int | None) -> None:
        """Refuse a call that can't be cut into forwards of `max_chunk_tokens`. Raises `SequenceError`."""
        num_kept = self.num_query_columns - num_skippable
        if max_chunk_tokens is not None and num_kept > max_chunk_tokens:
            raise SequenceError(
                f"this call asks for the logits or states of {num_kept} tokens, but max_chunk_tokens promises that no "
                f"forward has more than {max_chunk_tokens}: pass logits_to_keep, or fewer tokens"
            )

    def of_part(self, part: Part, token_ids: npt.NDArray[np.int64], padding: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Return the arguments of a call that computes a part of the batch, and of its logits as few as can be.

        `token_ids` `[n, end - first]` and `padding` `[n]` are those of the part's rows.
        """
        columns = np.arange(part.end)
        positions = np.maximum(columns[part.first :] - padding[:, None], 0)
        arguments = self.arguments | {
            "input_ids": self._tensor(token_ids),
            "attention_mask": self._tensor((columns >= padding[:, None]).astype(np.int64)),
            "position_ids": self._tensor(positions),
        }
        return arguments | ({"logits_to_keep": 1} if "logits_to_keep" in arguments else {})

    def _tensor(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.as_tensor(array, device=self.arguments["input_ids"].device)

    def without(self, num_columns: int) -> dict[str, Any]:
        """Return the arguments without the first `num_columns` query columns; the mask still covers all columns."""
        cut = {name: self.arguments[name] for name in _SLICED if self.arguments.get(name) is not None}
        return self.arguments | {name: value[..., num_columns:] for name, value in cut.items()}
