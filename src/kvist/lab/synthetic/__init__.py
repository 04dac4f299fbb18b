"""Workloads that nobody had: shared system prompts, chats, retrieval and agents, the same for a seed in any process."""

from kvist.lab.synthetic.kinds import Agents, Chat, Retrieval, SharedPrompts
from kvist.lab.synthetic.workload import WORKLOADS, SyntheticTrace, Workload

__all__ = ["WORKLOADS", "Agents", "Chat", "Retrieval", "SharedPrompts", "SyntheticTrace", "Workload"]
