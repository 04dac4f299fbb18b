"""Moves bytes of blocks: between planes and rows, and between tiers, in order, without the host waiting for copies."""

from kvist.memory.transfers.copying import Copier
from kvist.memory.transfers.cuda import CudaDevice
from kvist.memory.transfers.devices import CpuDevice, Device, Event
from kvist.memory.transfers.jobs import Job, columns_of
from kvist.memory.transfers.manager import MovesFailed, Transfer, TransferManager

__all__ = [
    "Copier",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "Event",
    "Job",
    "MovesFailed",
    "Transfer",
    "TransferManager",
    "columns_of",
]
