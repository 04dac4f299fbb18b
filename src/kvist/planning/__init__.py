"""What a cache needs, what fits in memory, and how memory is shared out among groups: arithmetic on a configuration.

Nothing here needs a manager, a model or a device.
"""

from kvist.planning.blocks import LayerBytes, blocks_held, blocks_needed, layer_bytes, sequence_bytes
from kvist.planning.capacity import longest_sequence, max_concurrency, pool_bytes, sized_for
from kvist.planning.devices import Demand, Deployment, DevicePlan, StagePlan, plan_devices, stage_configs
from kvist.planning.loads import Load
from kvist.planning.memory import balanced_shares, common_num_blocks, memory_budget, with_shares
from kvist.planning.models import decoder_settings, layers_of_model, model_setting
from kvist.planning.payoff import Rates, TierSize, TierValue, TraceValue, rates_of, value_of_tiers
from kvist.planning.report import GroupPlan, Plan, PoolPlan, TierPlan, plan
from kvist.planning.rings import largest_window
from kvist.planning.weights import LayerWeights, Weights, weights_of_model

__all__ = [
    "Demand", "Deployment", "DevicePlan", "GroupPlan", "LayerBytes", "LayerWeights", "Load", "Plan", "PoolPlan",
    "Rates", "StagePlan", "TierPlan", "TierSize", "TierValue", "TraceValue", "Weights",
    "balanced_shares", "blocks_held", "blocks_needed", "common_num_blocks", "decoder_settings", "largest_window",
    "layer_bytes", "layers_of_model", "longest_sequence", "max_concurrency", "memory_budget", "model_setting", "plan",
    "plan_devices", "pool_bytes", "rates_of", "sequence_bytes", "sized_for", "stage_configs", "value_of_tiers",
    "weights_of_model", "with_shares",
]  # fmt: skip
