"""What-if on real traffic: traces of requests, replayed on the same manager over sizes, policies and tiers."""
