"""Slower places for blocks than the device: stores on disk and in the network, by key."""
