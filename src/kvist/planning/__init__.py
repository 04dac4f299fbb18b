"""What a cache needs, what fits in memory, and how memory is shared out among groups: arithmetic on a configuration.

Nothing here needs a manager, a model or a device.
"""

from kvist.planning.blocks import LayerBytes, blocks_held, blocks_needed, layer_bytes, sequence_bytes
from kvist.planning.capacity import longest_sequence, max_concurrency, pool_bytes, sized_for
from kvist.planning.loads import Load
from kvist.planning.memory import balanced_shares, common_num_blocks, memory_budget, with_shares
from kvist.planning.models import layers_of_model
from kvist.planning.report import GroupPlan, Plan, PoolPlan, TierPlan, plan
from kvist.planning.rings import largest_window

__all__ = [
    "GroupPlan", "LayerBytes", "Load", "Plan", "PoolPlan", "TierPlan",
    "balanced_shares", "blocks_held", "blocks_needed", "common_num_blocks", "largest_window", "layer_bytes",
    "layers_of_model", "longest_sequence", "max_concurrency", "memory_budget", "plan", "pool_bytes", "sequence_bytes",
    "sized_for", "with_shares",
]  # fmt: skip
